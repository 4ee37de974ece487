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
from moesaic.gpu.nvshmem.job import JobPlace, NvshmemJob

NUMBER = 8
"""Bytes of a number that an end sends by the lifeline."""
WAKE_SECONDS = 0.5
"""A server is woken so often while graphs ask it. It sleeps after several times as long without a request."""
FIRST_SECONDS, MOST_SECONDS = 0.05, 10.0
"""A worker waits twice as long after each lifeline that was not made, from and up to about so long."""
_REQUEST_PLACE, _ANSWER_PLACE, _DOUBT_PLACE, _HEADER_PLACE = 0, 128, 256, 384
"""Places in a page, in bytes."""


def name_of(place: JoinJob) -> str:
    """What both ends call the job."""
    return sha256(place.unique_id).hexdigest()


class HostPage:
    """A page of the host that kernels tell what they asked a server, and what it answered."""

    def __init__(self, sharing: DeviceSharing) -> None:
        """Raises ConfigError if the driver refuses."""
        self._memory = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        self._words: npt.NDArray[np.int64] = self._memory.view(np.int64)
        self._segment: SharedMemory = sharing.map_host(self._memory)
        self.is_open = False
        """Whether a mailbox has this page now."""

    def address(self, place: int) -> int:
        """The address of a place in the page, as the device sees it."""
        return self._segment.tensor.data_ptr() + place

    @property
    def request_number(self) -> int:
        """The number of the last request."""
        return int(self._words[_REQUEST_PLACE // 8])

    @property
    def answer_number(self) -> int:
        """The number of the last answer."""
        return int(self._words[_ANSWER_PLACE // 8])

    @property
    def header(self) -> memoryview:
        """The header of the last request."""
        return self._memory.data[_HEADER_PLACE:]

    def settle(self) -> None:
        """The answer to the last request does not matter any more. Between steps."""
        self._words[_ANSWER_PLACE // 8] = self.request_number
        self._words[_DOUBT_PLACE // 8] = 0

    def doubts(self) -> bool:
        """Whether an answer had NaN or infinities since the last call."""
        has_doubts = bool(self._words[_DOUBT_PLACE // 8])
        self._words[_DOUBT_PLACE // 8] = 0
        return has_doubts

    def close(self) -> None:
        self._segment.close()


class NvshmemMailbox:
    """A ServerMailbox by NVSHMEM."""

    def __init__(self, line: Lifeline, job_place: JobPlace, pe: int, host_page: HostPage) -> None:
        """pe: number of the server's process. host_page: of this server, also by earlier mailboxes."""
        self._line, self._job_place, self._pe, self._host_page = line, job_place, pe, host_page
        self._channel, self._progress = job_place.place.channel(pe), Progress(host_page.request_number)
        self._greeting, self._open, self._awake, self._next_wake = b"", False, False, 0.0
        line.send(host_page.request_number.to_bytes(NUMBER, "little"))

    @property
    def addresses(self) -> tuple[int, ...]:
        channels, own_channel, channel = self._job_place.channels, self._job_place.own_channel, self._channel
        begin, host_address = self._job_place.heap.tensor.data_ptr(), self._host_page.address
        request, answers = begin + channels.request(channel), begin + channels.answers(channel)
        remote_addresses = begin + channels.request(own_channel), begin + channels.request_word(own_channel)
        words = host_address(_REQUEST_PLACE), begin + channels.answer_word(channel)
        return (
            request,
            *words,
            answers,
            self._pe,
            *remote_addresses,
            host_address(_HEADER_PLACE),
            host_address(_ANSWER_PLACE),
            host_address(_DOUBT_PLACE),
        )

    @property
    def is_quiet(self) -> bool:
        if not self._check_open():
            return False
        if (
            self._host_page.request_number != self._host_page.answer_number
            and self._word() >> 1 == self._host_page.request_number
        ):
            self._host_page.settle()  # it came after the step had failed
        return self._host_page.request_number == self._host_page.answer_number

    def alive(self, force: bool = False) -> bool:
        if self._awake:
            self.wake()
        return self._line.look(force)

    def doubts(self) -> bool:
        return self._host_page.doubts()

    def wake(self) -> None:
        self._awake = True
        self._wake()

    def _wake(self) -> None:
        now = time.monotonic()
        if now >= self._next_wake:
            self._next_wake = now + WAKE_SECONDS
            self._line.wake()

    def end_graph(self) -> None:
        self._awake = False

    def progress(self) -> tuple[int, int]:
        return self._progress.news(
            self._host_page.request_number, self._host_page.answer_number, self._host_page.header
        )

    def leave(self) -> None:
        self.close()

    def free(self) -> bool:
        return True

    def close(self) -> None:
        self.end_graph()
        self._line.close()
        self._host_page.is_open = False

    def _check_open(self) -> bool:
        """Whether both ends have all that was sent before.

        The server has said what its last word was, and that word has arrived, or it was never asked.
        """
        if not self._open:
            self._line.look(force=True)
            self._greeting = (self._greeting + self._line.take_received())[:NUMBER]
            if len(self._greeting) == NUMBER:
                self._open = self._word() == int.from_bytes(self._greeting, "little")
            if self._open:
                self._host_page.settle()
            else:
                self._wake()  # it may sleep when the last request arrives
        return self._open

    def _word(self) -> int:
        """The server's last word, as it is on the device now."""
        word_begin = self._job_place.channels.answer_word(self._channel)
        return int(self._job_place.heap.tensor[word_begin : word_begin + NUMBER].view(torch.int64)[0])


class NvshmemDialer:
    """A MailboxDialer by NVSHMEM."""

    def __init__(self, job: NvshmemJob, sharing: DeviceSharing, device: torch.device, hidden: int) -> None:
        self._job, self._sharing = job, sharing
        self._dialing = threading.Lock()
        self._num_failures: dict[str, int] = {}
        """Counts for each server's address how often in a row no lifeline was made."""
        self._host_pages: dict[int, HostPage] = {}
        """Maps each server's process to its page. Kernels that wait for nothing may still look there, so no
        page is freed."""
        self.rows = torch.empty(0, hidden, device=device)

    @property
    def job_id(self) -> bytes:
        return self._job.unique_id

    def dial(self, address: str, secret: bytes) -> NvshmemMailbox:
        """Connect to a server. Raises ConnectionLost while this process or the server is in no job."""
        job_place = self._job.job_place
        if job_place is None:
            raise ConnectionLost("this worker is in no NVSHMEM job yet")
        try:
            line = connect_lifeline(
                address, secret, {"job": name_of(job_place.place), "pe": job_place.place.pe}
            )
        except ConnectionLost:  # that of a server in no job too, which would be refused for ever
            num_failures = self._num_failures[address] = self._num_failures.get(address, 0) + 1
            time.sleep(min(MOST_SECONDS, FIRST_SECONDS * 2**num_failures))
            raise
        self._num_failures.pop(address, None)
        try:
            pe = _server(line.peer, job_place.place)
            with self._dialing:  # an attempt that was stopped may be under way too
                host_page = self._host_pages.setdefault(
                    pe, self._host_pages.get(pe) or HostPage(self._sharing)
                )
                if host_page.is_open:
                    raise ConnectionLost(f"the mailbox at process {pe} before this one is still open")
                host_page.is_open = True
            return NvshmemMailbox(line, job_place, pe, host_page)
        except BaseException:
            line.close()
            raise

    def join(self, place: JoinJob) -> None:
        self._job.join(place)

    def close(self) -> None:
        for host_page in self._host_pages.values():
            host_page.close()


def _server(peer: dict[str, Any], place: JoinJob) -> int:
    """The number of the server's process. Raises ConnectionLost if it has said none."""
    pe = peer.get("pe")
    if type(pe) is not int or not place.workers <= pe < place.workers + place.servers:
        raise ConnectionLost(f"an expert server says that it is process {pe!r} of the NVSHMEM job")
    return pe
