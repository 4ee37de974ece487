"""The server's end of channels to workers, by NVSHMEM. See `gpu.nvshmem.job` for the memory.

Requests arrive in the memory of the server's GPU, and nothing wakes the host. So the host reads all words of
requests at once, as long as graphs may ask: workers wake the server by their lifelines meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.gpu.exchange.lifeline import Lifeline
from moesaic.gpu.exchange.mailbox_answerer import MailboxRequest
from moesaic.gpu.ipc.device_calls import CallRows, DeviceIncoming
from moesaic.gpu.nvshmem.job import WORD, JobPlace, NvshmemJob
from moesaic.gpu.nvshmem.nvshmem_mailbox import NUMBER, WAKE_SECONDS, name_of
from moesaic.kernels.moving import to_host_arrays
from moesaic.transport.calls import Answerer, Incoming
from moesaic.transport.words import Word

LOOK_SECONDS = 1e-5
"""The words are read at most this often. Assumed to be about the time of a small copy from a GPU."""
AWAKE_SECONDS = 4 * WAKE_SECONDS
"""A server looks for requests so long after the last one, or after it was woken."""
BUSY_SECONDS, NAP_SECONDS = 0.1, 5e-4
"""It naps between two looks after so long without a request."""


class Inbox:
    """The channels of an expert server. But for `accept`, the server's thread uses it."""

    def __init__(self, job: NvshmemJob) -> None:
        self._job = job
        self._words: IntArray = np.zeros(0, dtype=np.int64)
        self._next_look = self._next_nap = 0.0
        self.news = 0.0
        """When the last request of any worker came."""
        self._owners: dict[int, NvshmemAnswerer] = {}
        self.sent_words: dict[int, int] = {}
        """The last word that each worker was sent, by its channel."""

    def accept(self, client: Word) -> tuple[Word, Callable[[Lifeline], Answerer]]:
        """Check a client, as `lifeline.Introduce` describes. Any thread may call it."""
        job_place, pe = self._job.job_place, client.get("pe")
        if job_place is None or client.get("job") != name_of(job_place.place):
            raise ConnectionLost("this server is in no NVSHMEM job, or in another one than the client")
        if type(pe) is not int or not 0 <= pe < job_place.place.workers:
            raise ConnectionLost(f"a client says that it is process {pe!r} of the NVSHMEM job")
        return {"pe": job_place.place.pe}, lambda line: NvshmemAnswerer(self, job_place, line, pe)

    def word(self, job_place: JobPlace, channel: int) -> int:
        """The number of the last request of a worker, as was there LOOK_SECONDS ago at most."""
        now = time.monotonic()
        if now >= self._next_look:
            count = job_place.channels.count
            words = job_place.heap.tensor[: WORD * count].view(torch.int64).view(count, -1)[:, 0]
            (words_read,) = to_host_arrays((words,))
            assert words_read is not None
            self._words, self._next_look = words_read, time.monotonic() + LOOK_SECONDS
        return int(self._words[channel])

    def nap(self) -> None:
        """Leave the core to others if no worker has asked for a while, and not once for each worker."""
        now = time.monotonic()
        if now - self.news > BUSY_SECONDS and now >= self._next_nap:
            time.sleep(NAP_SECONDS)
            self._next_nap = time.monotonic() + NAP_SECONDS

    def take_over(self, channel: int, end: NvshmemAnswerer) -> None:
        """Give the channel to this end, and take it from any other."""
        self._owners[channel] = end

    def is_owner(self, channel: int, end: NvshmemAnswerer) -> bool:
        return self._owners.get(channel) is end


class NvshmemAnswerer:
    """An Answerer whose requests and rows are in the symmetric heap."""

    def __init__(self, inbox: Inbox, job_place: JobPlace, line: Lifeline, pe: int) -> None:
        """pe: number of the worker's process."""
        self._inbox, self._job_place, self._line, self._pe = inbox, job_place, line, pe
        self._channel = job_place.place.channel(pe)
        self._greeting, self._open, self._last_request, self._last_answer = b"", False, 0, 0
        self._awake, self._news = time.monotonic(), 0.0
        """When this end was woken, and when the last request came."""

    @property
    def events(self) -> int:
        return self._line.events

    def fileno(self) -> int:
        return self._line.fileno()

    def ready(self) -> bool:
        return self._line.loss is not None or (self._may_have_request and self._word() != self._last_request)

    def arm(self) -> bool:
        """A GPU posts without a wakeup, so there may be news at any time while the worker says so."""
        if self.ready():
            return True
        if not self._is_awake:
            return False
        self._inbox.nap()
        return True

    def disarm(self) -> None:
        self._line.look(force=True)

    def poll(self) -> list[Incoming]:
        """Returns the new request, if there is one. A channel has at most one."""
        if not self._line.look() and self._line.loss is not None:
            raise self._line.loss.copy()
        if not self._open:
            self._begin()
            return []
        if not self._inbox.is_owner(self._channel, self):
            raise ConnectionLost("the worker has connected once more")
        if self._line.take_received():
            self._awake = time.monotonic()
        number = self._word() if self._may_have_request else self._last_request
        if number == self._last_request:
            return []
        if self._last_answer != self._last_request:
            raise DamagedMessage("a client posted a request before the last one was answered")
        self._last_request, self._news = number, time.monotonic()
        self._inbox.news = self._news
        return [self._incoming(number)]

    def close(self) -> None:
        """The worker notices. Its memory stays, as it is that of this process."""
        self._line.close()

    def _begin(self) -> None:
        """Take the channel once everything has arrived that the worker sent before, and say so."""
        if message := self._line.take_received():
            self._greeting, self._awake = (self._greeting + message)[:NUMBER], time.monotonic()
        if len(self._greeting) < NUMBER:
            return
        last = int.from_bytes(self._greeting, "little")
        self._inbox.take_over(self._channel, self)
        if self._word() == last:
            self._open, self._last_request, self._last_answer = True, last, last
            self._line.send(self._inbox.sent_words.get(self._channel, 0).to_bytes(NUMBER, "little"))

    @property
    def _is_awake(self) -> bool:
        return time.monotonic() - max(self._awake, self._news) <= AWAKE_SECONDS

    @property
    def _may_have_request(self) -> bool:
        """Whether there may be a request. To look for one waits for the GPU."""
        return self._open and self._is_awake

    def _word(self) -> int:
        return self._inbox.word(self._job_place, self._channel)

    def _incoming(self, number: int) -> Incoming:
        heap, channels, channel = self._job_place.heap, self._job_place.channels, self._channel
        heap.await_signal(channels.request_word(channel), number)
        begin, width = channels.request(channel), 4 * channels.hidden
        (memory,) = to_host_arrays((heap.tensor[begin : begin + channels.request_bytes],))
        assert memory is not None
        rows, pairs = wire.read_counts(memory.data)
        if pairs > channels.pairs or rows > channels.rows:
            raise DamagedMessage(f"a request claims {rows} of {channels.rows} rows, and {pairs} pairs")
        request = memory.data[: wire.size(rows, pairs, 0, False, on_device=True)].toreadonly()
        incoming = MailboxRequest(number, request, pairs, partial(self._answer, pairs))
        begin += channels.rows_at(rows, pairs)
        answers = channels.answers(channel)
        call_rows = CallRows(
            heap.tensor[begin : begin + max(1, rows) * width],
            heap.tensor[answers : answers + incoming.rows * width],
        )
        return DeviceIncoming(incoming, 0, width, call_rows)

    def _answer(self, pairs: int, number: int, doubt: bool) -> None:
        """Send the answer rows, and behind them the word. The GPU has written the rows.

        Nothing goes to a worker that has died meanwhile.
        """
        if not (self._inbox.is_owner(self._channel, self) and self._line.look(force=True)):
            return
        channels, own_channel, word = (
            self._job_place.channels,
            self._job_place.own_channel,
            2 * number + doubt,
        )
        size, source = 4 * channels.hidden * pairs, channels.answers(self._channel)
        self._job_place.heap.put(
            channels.answers(own_channel), source, size, channels.answer_word(own_channel), word, self._pe
        )
        self._inbox.sent_words[self._channel], self._last_answer = word, number
