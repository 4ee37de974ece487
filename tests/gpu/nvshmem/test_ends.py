"""The two ends of channels by NVSHMEM, with heaps in one process: what goes wrong between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import JoinJob
from moesaic.experts import wire
from moesaic.gpu.exchange.lifeline import connect_lifeline, lifeline_kind
from moesaic.gpu.nvshmem import answerer as nvshmem_answerer
from moesaic.gpu.nvshmem.answerer import Inbox, NvshmemAnswerer
from moesaic.gpu.nvshmem.job import Channels, JobPlace, NvshmemJob
from moesaic.gpu.nvshmem.nvshmem_mailbox import NvshmemDialer, NvshmemMailbox
from moesaic.transport import host_watch
from moesaic.transport.listening import Listener
from moesaic.transport.waiting import wait

SECRET = b"a secret of the tests"
WORKERS, ROWS, TOP_K, HIDDEN = 2, 4, 2, 8
WHERE = Channels(WORKERS, ROWS, ROWS * TOP_K, HIDDEN)


class Heap:
    """SymmetricHeap. Puts arrive at once, or when the test lets them."""

    def __init__(self, pe: int, heaps: dict[int, Heap]) -> None:
        self.pe, self.tensor = pe, torch.zeros(WHERE.size, dtype=torch.uint8)
        self._heaps, self.late, self.puts = heaps, list[Callable[[], None]](), list[int]()
        self.held = False
        heaps[pe] = self

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        there, rows = self._heaps[pe].tensor, self.tensor[source : source + size].clone()

        def arrives() -> None:
            there[target : target + size] = rows
            there[signal : signal + 8].view(torch.int64)[0] = number

        self.puts.append(pe)
        self.late.append(arrives)
        if not self.held:
            self.arrive()

    def arrive(self) -> None:
        """All puts on their way arrive."""
        while self.late:
            self.late.pop(0)()

    def await_signal(self, signal: int, number: int) -> None:
        assert int(self.tensor[signal : signal + 8].view(torch.int64)[0]) == number

    def quiet(self) -> None:
        self.arrive()


class Sharing:
    """DeviceSharing of the CPU."""

    def map_host(self, memory: Any) -> Any:
        return SimpleNamespace(tensor=torch.from_numpy(memory), close=bool)


class Place:
    """A server, whose turns the test takes, and its workers."""

    def __init__(self, address: str = "tcp:127.0.0.1:0") -> None:
        heaps: dict[int, Heap] = {}
        self.places = [JoinJob(b"a job", pe, WORKERS, 1) for pe in range(WORKERS + 1)]
        self.heaps = [Heap(pe, heaps) for pe in range(WORKERS + 1)]
        self.joined = [JobPlace(*each) for each in zip(self.heaps, [WHERE] * 3, self.places, strict=True)]
        self.inbox = Inbox(self._job(WORKERS))
        self.listener = Listener(address, SECRET, kinds=lifeline_kind(self.inbox.accept))
        self.dialers = [NvshmemDialer(self._job(pe), Sharing(), torch.device("cpu"), HIDDEN) for pe in (0, 1)]  # type: ignore[arg-type]
        self.number, self._ends = 0, list[NvshmemMailbox | NvshmemAnswerer]()

    def _job(self, pe: int) -> NvshmemJob:
        return cast(NvshmemJob, SimpleNamespace(job_place=self.joined[pe]))

    @property
    def server(self) -> Heap:
        return self.heaps[WORKERS]

    def dial(self, worker: int = 0) -> tuple[NvshmemMailbox, NvshmemAnswerer]:
        mailbox = self.dialers[worker].dial(self.listener.address, SECRET)
        until = time.monotonic() + 20
        while not (ends := self.listener.take_connections()):
            assert time.monotonic() < until
            time.sleep(0.001)
        end = cast(NvshmemAnswerer, ends[0])
        self._ends += [mailbox, end]
        return mailbox, end

    def opened(self, worker: int = 0) -> tuple[NvshmemMailbox, NvshmemAnswerer]:
        mailbox, end = self.dial(worker)
        soon(lambda: end.poll() == [] and mailbox.is_quiet)
        return mailbox, end

    def post(self, mailbox: NvshmemMailbox, worker: int = 0) -> None:
        """As the kernels: one row with its two experts."""
        self.number += 1
        heap, pairs = self.heaps[worker], np.array([0, 1])
        size = wire.size(1, 2, HIDDEN, False, on_device=True)
        memory = memoryview(heap.tensor.numpy())[WHERE.request(0) :][:size]  # type: ignore[arg-type]
        given = 0, pairs, np.zeros(2, int), None, np.zeros((1, HIDDEN), np.float32)
        wire.write(memory, *given, places=np.zeros(1, int))
        told = mailbox._host_page
        told.header[:size] = memory
        told._words[0] = self.number
        where = WHERE.request(worker), WHERE.request(0), WHERE.rows_at(1, 2) + 4 * HIDDEN
        heap.put(*where, WHERE.request_word(worker), self.number, WORKERS)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self.listener.close()


def soon(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not there():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def requested(end: NvshmemAnswerer) -> Any:
    found: list[Any] = []
    soon(lambda: bool(found.extend(end.poll()) or found))
    return found[0]


def test_a_channel_that_is_used_again_counts_no_old_request(place: Place) -> None:
    """A server would look slow by a request that nobody asked it over this mailbox, or quick by its end."""
    mailbox, end = place.opened()
    place.post(mailbox)
    assert mailbox.progress() == (2, 0)
    place.server.held = True
    requested(end).publish(np.arange(2))
    mailbox.leave()
    with pytest.raises(ConnectionLost):
        soon(lambda: end.poll() != [])
    again, other = place.dial()
    assert other.poll() == [] and not again.is_quiet
    assert again.progress() == (0, 0)
    place.server.arrive()
    soon(lambda: other.poll() == [] and again.is_quiet)
    assert again.progress() == (0, 0)
    place.post(again)
    assert again.progress() == (2, 0)


def test_a_channel_opens_though_the_server_sleeps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker sent before arrives after the server has gone to sleep. Nothing else wakes it."""
    mailbox, end = place.opened()
    place.heaps[0].held = True
    place.post(mailbox)
    mailbox.leave()
    again, other = place.dial()
    end.close()
    monkeypatch.setattr(nvshmem_answerer, "AWAKE_SECONDS", 0.0)
    soon(lambda: other.poll() == [] and not wait([other], timeout=0.01))
    place.heaps[0].arrive()
    until = time.monotonic() + 5
    while not again.is_quiet and time.monotonic() < until:
        if wait([other], timeout=0.01):
            other.poll()
    assert again.is_quiet


def test_nothing_is_sent_to_a_worker_that_died_meanwhile(place: Place) -> None:
    """Its connection ends while the request is computed."""
    mailbox, end = place.opened()
    place.post(mailbox)
    request = requested(end)
    mailbox._line.close()
    time.sleep(0.05)
    request.publish(np.arange(2))
    assert place.server.puts == []


def test_an_idle_worker_does_not_delay_another_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server naps when no worker has asked for a while, and once for all of them."""
    (_, quiet), (mailbox, busy) = place.opened(0), place.opened(1)
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=naps.append)
    monkeypatch.setattr(nvshmem_answerer, "time", clock)
    monkeypatch.setattr(nvshmem_answerer, "NAP_SECONDS", 10.0)
    assert quiet.arm() and busy.arm() and len(naps) == 1
    monkeypatch.setattr(nvshmem_answerer, "NAP_SECONDS", 0.0)
    place.post(mailbox, 1)
    requested(busy).publish(np.arange(2))
    naps.clear()
    assert quiet.arm() and busy.arm() and naps == []


def test_words_are_read_only_while_graphs_may_ask(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look waits for the GPU, and there may be calls by other transports all the time."""
    mailbox, end = place.opened()
    monkeypatch.setattr(nvshmem_answerer, "AWAKE_SECONDS", 0.0)
    place.post(mailbox)
    soon(lambda: end._line.look(force=True) and not end.ready())
    assert not end.ready() and end.poll() == []
    monkeypatch.setattr(nvshmem_answerer, "AWAKE_SECONDS", 60.0)
    mailbox.wake()
    assert requested(end).number == 1


def test_a_lost_host_ends_the_lifeline_at_both_ends(place: Place) -> None:
    mailbox, end = place.opened()
    watched = {sock.fileno() for sock in host_watch._PROCESS._sockets}
    assert {mailbox._line.fileno(), end.fileno()} <= watched


@pytest.mark.parametrize("who", [{"pe": True}, {"pe": -1}, {"pe": WORKERS}, {"pe": "0"}, {"job": ["a"]}, {}])
def test_a_client_that_lies_is_refused(place: Place, who: dict[str, object]) -> None:
    job = {"job": nvshmem_answerer.name_of(place.places[0])} if who else {}
    with pytest.raises(ConnectionLost):
        connect_lifeline(place.listener.address, SECRET, job | who)
    place.opened()
