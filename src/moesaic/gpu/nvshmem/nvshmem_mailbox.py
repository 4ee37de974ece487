"""The worker's end of a channel to an expert server, by NVSHMEM. See `gpu.nvshmem.job` for the memory.

Kernels write the requests and wait for the answers (`gpu.triton.nvshmem_exchange`), and tell the host in
a page of its memory. A lifeline shows whether the server is there. A channel is used again after its lifeline
was lost only when both ends have all that was sent before: then the server sends the last word that it wrote.
"""

from __future__ import annotations

import mmap
import threading
import time
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import JoinJob
from moesaic.gpu.exchange.lifeline import Lifeline, connect_lifeline
from moesaic.gpu.exchange.server_mailbox import Progress
from moesaic.gpu.ipc.device_sharing import PAGE, DeviceSharing, SharedMemory
from moesaic.gpu.nvshmem.job import Joined, NvshmemJob

NUMBER = 8
"""Bytes of a number that an end sends by the lifeline."""
WAKE_SECONDS = 0.5
"""A server is woken so often while graphs ask it. It sleeps after several times as long without a request."""
FIRST_SECONDS, MOST_SECONDS = 0.05, 10.0
"""A worker waits twice as long after each lifeline that was not made, from and up to about so long."""
_POSTED, _ANSWERED, _DOUBT, _HEADER = 0, 128, 256, 384
"""Places in a page, in bytes."""


def name_of(place: JoinJob) -> str:
    """What both ends call the job."""
    return sha256(place.unique_id).hexdigest()


class Told:
    """A page of the host that kernels tell what they asked a server, and what it answered."""

    def __init__(self, sharing: DeviceSharing) -> None:
        """Raises ConfigError if the driver refuses."""
        self._memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        self._words: npt.NDArray[np.int64] = self._memory.view(np.int64)
        self._segment: SharedMemory = sharing.map_host(self._memory)
        self.open = False
        """Whether a mailbox has this page now."""

    def address(self, place: int) -> int:
        """As the device sees it."""
        return self._segment.tensor.data_ptr() + place

    @property
    def posted(self) -> int:
        """The number of the last request."""
        return int(self._words[_POSTED // 8])

    @property
    def answered(self) -> int:
        """The number of the last answer."""
        return int(self._words[_ANSWERED // 8])

    @property
    def header(self) -> memoryview:
        """Of the last request."""
        return self._memory.data[_HEADER:]

    def settle(self) -> None:
        """The answer to the last request does not matter any more. Between steps."""
        self._words[_ANSWERED // 8] = self.posted
        self._words[_DOUBT // 8] = 0

    def doubts(self) -> bool:
        """Whether an answer had NaN or infinities since the last call."""
        found = bool(self._words[_DOUBT // 8])
        self._words[_DOUBT // 8] = 0
        return found

    def close(self) -> None:
        self._segment.close()


class NvshmemMailbox:
    """A ServerMailbox by NVSHMEM."""

    def __init__(self, line: Lifeline, joined: Joined, pe: int, told: Told) -> None:
        """pe: number of the server's process. told: of this server, also by earlier mailboxes."""
        self._line, self._joined, self._pe, self._told = line, joined, pe, told
        self._channel, self._progress = joined.place.channel(pe), Progress(told.posted)
        self._said, self._open, self._awake, self._next_wake = b"", False, False, 0.0
        line.send(told.posted.to_bytes(NUMBER, "little"))

    @property
    def addresses(self) -> tuple[int, ...]:
        where, own, channel = self._joined.channels, self._joined.own, self._channel
        begin, told = self._joined.heap.tensor.data_ptr(), self._told.address
        request, answers = begin + where.request(channel), begin + where.answers(channel)
        there = begin + where.request(own), begin + where.request_word(own)
        words = told(_POSTED), begin + where.answer_word(channel)
        return request, *words, answers, self._pe, *there, told(_HEADER), told(_ANSWERED), told(_DOUBT)

    @property
    def quiet(self) -> bool:
        if not self._opened():
            return False
        if self._told.posted != self._told.answered and self._word() >> 1 == self._told.posted:
            self._told.settle()  # it came after the step had failed
        return self._told.posted == self._told.answered

    def alive(self, at_once: bool = False) -> bool:
        if self._awake:
            self.wake()
        return self._line.look(at_once)

    def doubts(self) -> bool:
        return self._told.doubts()

    def wake(self) -> None:
        self._awake = True
        self._wake()

    def _wake(self) -> None:
        now = time.monotonic()
        if now >= self._next_wake:
            self._next_wake = now + WAKE_SECONDS
            self._line.wake()

    def rest(self) -> None:
        self._awake = False

    def progress(self) -> tuple[int, int]:
        return self._progress.news(self._told.posted, self._told.answered, self._told.header)

    def leave(self) -> None:
        self.close()

    def free(self) -> bool:
        return True

    def close(self) -> None:
        self.rest()
        self._line.close()
        self._told.open = False

    def _opened(self) -> bool:
        """Whether both ends have all that was sent before.

        The server has said what its last word was, and that word has arrived, or it was never asked.
        """
        if not self._open:
            self._line.look(at_once=True)
            self._said = (self._said + self._line.received())[:NUMBER]
            if len(self._said) == NUMBER:
                self._open = self._word() == int.from_bytes(self._said, "little")
            if self._open:
                self._told.settle()
            else:
                self._wake()  # it may sleep when the last request arrives
        return self._open

    def _word(self) -> int:
        """The server's last word, as it is on the device now."""
        at = self._joined.channels.answer_word(self._channel)
        return int(self._joined.heap.tensor[at : at + NUMBER].view(torch.int64)[0])


class NvshmemDialer:
    """A MailboxDialer by NVSHMEM."""

    def __init__(self, job: NvshmemJob, sharing: DeviceSharing, device: torch.device, hidden: int) -> None:
        self._job, self._sharing = job, sharing
        self._dialing = threading.Lock()
        self._failed: dict[str, int] = {}
        """By the address of a server: how often no lifeline was made, one after the other."""
        self._told: dict[int, Told] = {}
        """By the server's process. Kernels that wait for nothing may still look there, so none is freed."""
        self.rows = torch.empty(0, hidden, device=device)

    @property
    def job_id(self) -> bytes:
        return self._job.unique_id

    def dial(self, address: str, secret: bytes) -> NvshmemMailbox:
        """See `MailboxDialer`. Raises ConnectionLost while this process or the server is in no job."""
        joined = self._job.joined
        if joined is None:
            raise ConnectionLost("this worker is in no NVSHMEM job yet")
        try:
            line = connect_lifeline(address, secret, {"job": name_of(joined.place), "pe": joined.place.pe})
        except ConnectionLost:  # that of a server in no job too, which would be refused for ever
            failed = self._failed[address] = self._failed.get(address, 0) + 1
            time.sleep(min(MOST_SECONDS, FIRST_SECONDS * 2**failed))
            raise
        self._failed.pop(address, None)
        try:
            pe = _server(line.peer, joined.place)
            with self._dialing:  # an attempt that was stopped may be under way too
                told = self._told.setdefault(pe, self._told.get(pe) or Told(self._sharing))
                if told.open:
                    raise ConnectionLost(f"the mailbox at process {pe} before this one is still open")
                told.open = True
            return NvshmemMailbox(line, joined, pe, told)
        except BaseException:
            line.close()
            raise

    def join(self, place: JoinJob) -> None:
        self._job.join(place)

    def close(self) -> None:
        for told in self._told.values():
            told.close()


def _server(peer: dict[str, Any], place: JoinJob) -> int:
    """The number of the server's process. Raises ConnectionLost if it has said none."""
    pe = peer.get("pe")
    if type(pe) is not int or not place.workers <= pe < place.workers + place.servers:
        raise ConnectionLost(f"an expert server says that it is process {pe!r} of the NVSHMEM job")
    return pe
