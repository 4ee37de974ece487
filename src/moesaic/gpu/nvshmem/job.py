"""The NVSHMEM job of a cluster: its attention workers, then its expert servers, and their memory.

Each worker and each server have a channel to each other: a request with its rows goes into the memory of the
server, and the answer rows into that of the worker. A process puts what it sends together in its own heap
first, at the same place at which the other one gets it. So one layout serves both:

    words of requests, words of answers      one for each channel, 128 bytes apart
    requests                                 each with its rows behind it
    answers

The channel of a worker's heap has the number of the server, and that of a server's heap the number of the
worker.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cached_property

from moesaic.core.errors import MoesaicError
from moesaic.core.experts import ExpertLayout
from moesaic.core.job_membership import JobMembership
from moesaic.core.messages import JoinJob
from moesaic.experts import wire
from moesaic.gpu.exchange.exchange_launches import ALIGNMENT
from moesaic.gpu.nvshmem.symmetric_heap import SymmetricHeap, SymmetricJobs

LOG = logging.getLogger(__name__)
WORD = 128
"""Bytes from one word to the next one: a cache line of a GPU."""
SECOND = "this process was told to join an NVSHMEM job before, and joins no other one; start it anew for that"


def align(size: int) -> int:
    """`size`, rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Channels:
    """Where the channels of a heap are. All places are offsets in bytes."""

    count: int
    rows: int
    """Most rows of a request."""
    pairs: int
    """Most pairs of a request, each with an answer row."""
    hidden: int

    @property
    def request_bytes(self) -> int:
        """The bytes of the largest request without its rows."""
        return wire.size(self.rows, self.pairs, self.hidden, False, on_device=True)

    @property
    def _request_room(self) -> int:
        return align(self.request_bytes) + align(4 * self.rows * self.hidden)

    @property
    def _answer_room(self) -> int:
        return align(4 * self.pairs * self.hidden)

    def rows_at(self, rows: int, pairs: int) -> int:
        """The bytes from the begin of a request to its rows."""
        return align(wire.size(rows, pairs, self.hidden, False, on_device=True))

    @property
    def size(self) -> int:
        """The bytes of the heap."""
        return self.answers(self.count)

    def request_word(self, channel: int) -> int:
        return WORD * channel

    def answer_word(self, channel: int) -> int:
        return WORD * (self.count + channel)

    def request(self, channel: int) -> int:
        return align(WORD * 2 * self.count) + channel * self._request_room

    def answers(self, channel: int) -> int:
        return self.request(self.count) + channel * self._answer_room


def channels(layout: ExpertLayout, rows: int, place: JoinJob) -> Channels:
    """rows: most rows of a step."""
    return Channels(max(place.workers, place.servers), rows, rows * layout.top_k, layout.hidden)


@dataclass(frozen=True)
class JobPlace:
    """The place of this process in a job that was formed."""

    heap: SymmetricHeap
    channels: Channels
    place: JoinJob

    @property
    def own_channel(self) -> int:
        """The number of the own channel in heaps of the other side."""
        return self.place.channel(self.place.pe)


class NvshmemJob:
    """Joins a job in the background, as that waits for all other processes."""

    def __init__(
        self, jobs: SymmetricJobs, layout: ExpertLayout, rows: int, process: JobMembership | None = None
    ) -> None:
        """rows: most rows of a step. process: of this process, which may have been in another cluster. None:
        it was in none."""
        self._jobs, self._layout, self._rows = jobs, layout, rows
        self._process = JobMembership() if process is None else process
        self.job_place: JobPlace | None = None
        """None until all processes have joined."""
        if self._process.was_told:
            LOG.warning(SECOND)

    @property
    def can_join(self) -> bool:
        """Whether this process was told to join no job so far."""
        return not self._process.was_told

    @cached_property
    def unique_id(self) -> bytes:
        """The name of a new job, of which this process can be PE 0. Empty: it can join none."""
        return self._jobs.unique_id() if self.can_join else b""

    def join(self, place: JoinJob) -> None:
        """Take this place. A process can be in one job only, so a further call is ignored."""
        if not self.can_join:
            LOG.warning(SECOND)
            return
        self._process.was_told = True
        threading.Thread(target=self._join, args=(place,), name="joining NVSHMEM", daemon=True).start()

    def _join(self, place: JoinJob) -> None:
        job_channels = channels(self._layout, self._rows, place)
        pes = place.workers + place.servers
        try:
            heap = self._jobs.join(place.unique_id, place.pe, pes, job_channels.size)
        except MoesaicError as error:
            LOG.warning("%s; decode steps are computed in parts", error)
            return
        self.job_place = JobPlace(heap, job_channels, place)
        LOG.info("PE %d of an NVSHMEM job of %d, with %d MiB", place.pe, pes, job_channels.size >> 20)
