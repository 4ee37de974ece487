"""Calls whose rows stay on GPUs, with arrays of this process in place of a GPU's memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.call_pairs import HEAP, PATIENCE, SECRET, accepted

from moesaic.core.errors import ConfigError, ConnectionLost, DamagedMessage
from moesaic.gpu.ipc.device_calls import (
    GOODBYE,
    Departures,
    DeviceAnswerer,
    DeviceCall,
    DeviceCaller,
    DeviceIncoming,
    device_kind,
)
from moesaic.gpu.ipc.device_heap import ALIGNMENT, DeviceHeap
from moesaic.transport.calls import Incoming
from moesaic.transport.listening import Listener, connect
from moesaic.transport.shm import ShmCaller
from moesaic.transport.waiting import wait

ROOM = 4 * ALIGNMENT
ROW = 40


class Memory:
    """SharedMemory of this process."""

    def __init__(self, name: bytes, tensor: npt.NDArray[np.uint8]) -> None:
        self.name, self.tensor, self.closed = name, tensor, 0

    def close(self) -> None:
        self.closed += 1


class Gpu:
    """What is exported, by name, and what is open."""

    def __init__(self) -> None:
        self.exported: dict[bytes, Memory] = {}
        self.opened: list[Memory] = []

    def export(self, size: int) -> Memory:
        name = b"memory %d" % len(self.exported)
        self.exported[name] = Memory(name, np.zeros(max(ROOM, size), np.uint8))
        return self.exported[name]

    def open(self, name: bytes) -> Memory:
        if name not in self.exported:
            raise DamagedMessage(f"{len(name)} bytes do not name memory of a GPU")
        self.opened.append(Memory(b"", self.exported[name].tensor))
        return self.opened[-1]


class Pair:
    """Both ends of a connection."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        listener = Listener(f"unix:{folder}/s", SECRET, kinds=device_kind(gpu.open))
        try:
            caller = connect(listener.address, SECRET, "cuda_ipc", HEAP)
            found = accepted(listener)
        finally:
            listener.close()
        assert isinstance(caller, ShmCaller) and isinstance(found, DeviceAnswerer)
        self.departures, self.heap = Departures(), DeviceHeap(gpu.export)
        self.caller, self.answerer = DeviceCaller(caller, self.heap, self.departures), found
        self.rows = DeviceHeap(gpu.export)

    def call(self, rows: int = 2) -> tuple[DeviceCall, DeviceIncoming]:
        """A call on the device, at both ends."""
        place = self.rows.take(3 * ROW)
        place.tensor[:] = np.arange(3 * ROW)
        call = self.caller.open_on_device(5, rows, ROW, place)
        assert call is not None
        call.request[:] = b"which"
        self.caller.post(call)
        return call, self.incoming()

    def incoming(self) -> DeviceIncoming:
        found: list[Incoming] = []
        until = time.monotonic() + PATIENCE
        while not found and time.monotonic() < until:
            wait([self.answerer], timeout=0.1)
            found = self.answerer.poll()
        assert len(found) == 1 and isinstance(found[0], DeviceIncoming)
        return found[0]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def pair(gpu: Gpu, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(gpu, tmp_path)
    yield made
    made.caller.close()
    made.answerer.close()
    made.departures.close()


def test_rows_are_read_and_written_in_the_clients_memory(gpu: Gpu, pair: Pair) -> None:
    call, incoming = pair.call()
    assert bytes(incoming.request) == b"which" and (incoming.rows, incoming.row_bytes) == (2, ROW)
    assert incoming.call_rows is not None and len(incoming.answer) == 2
    assert incoming.call_rows.rows.tolist() == list(range(3 * ROW))
    incoming.call_rows.answer[ROW:] = 7
    incoming.answer[1:2] = b"\1"
    incoming.publish(np.array([1]))
    [(same, rows)] = pair.caller.poll()
    assert same is call and rows.tolist() == [1] and call.answer.tobytes() == b"\0\1"
    assert call.device_answer[ROW:].tolist() == [7] * ROW and (call.rows, call.row_bytes) == (2, ROW)
    assert len(gpu.opened) == 2
    incoming.publish(np.array([0]))
    pair.caller.poll()
    pair.caller.release(call)
    pair.call()
    assert len(gpu.opened) == 2, "memory is opened once"


def test_calls_of_the_host_go_beside_them(pair: Pair) -> None:
    call = pair.caller.open(3, 1, 4)
    assert call is not None and call.device_answer is None
    call.request[:] = b"all"
    pair.caller.post(call)
    incoming = pair.incoming()
    assert incoming.call_rows is None and incoming.row_bytes == 4 and bytes(incoming.request) == b"all"
    incoming.answer[:] = b"done"
    incoming.publish(np.array([0]))
    assert [same for same, _ in pair.caller.poll()] == [call] and call.answer.tobytes() == b"done"


def test_a_place_is_used_again_once_the_host_has_waited(pair: Pair) -> None:
    """Until then the own GPU may still read the answer."""
    call, incoming = pair.call()
    incoming.publish(np.array([0, 1]))
    pair.caller.poll()
    pair.caller.release(call)
    assert call.place is not None
    second, _ = pair.call()
    assert second.place is not None and second.place.begin != call.place.begin
    pair.heap.reclaim_places()
    third, _ = pair.call()
    assert third.place is not None and third.place.begin == call.place.begin


def test_a_call_that_ends_early_keeps_its_place(pair: Pair) -> None:
    """The server may still write there."""
    call, incoming = pair.call()
    pair.caller.release(call)
    pair.heap.reclaim_places()
    other, _ = pair.call()
    assert call.place is not None and other.place is not None and other.place.begin != call.place.begin
    incoming.publish(np.array([0, 1]))


def test_a_heap_grows_and_joins_what_is_free() -> None:
    gpu = Gpu()
    heap = DeviceHeap(gpu.export)
    places = [heap.take(ALIGNMENT - 1) for _ in range(4)]
    assert [place.begin for place in places] == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
    assert len(places[0].tensor) == ALIGNMENT - 1 and heap.size == ROOM
    grown = heap.take(ROOM + 1)
    assert grown.begin == 0 and grown.memory is not places[0].memory
    for place in (places[0], places[2], places[1]):
        heap.give_back(place)
    heap.reclaim_places()
    assert heap.take(3 * ALIGNMENT).begin == 0
    heap.close()
    assert all(memory.closed for memory in gpu.exported.values())


@pytest.mark.parametrize(
    ("begin", "name"), [(3 * ALIGNMENT, b""), (1, b""), (1 << 40, b""), (0, b"memory 9"), (0, b"m")]
)
def test_damaged_places_drop_the_client(pair: Pair, begin: int, name: bytes) -> None:
    place = pair.rows.take(2 * ALIGNMENT)
    memory = Memory(name or place.memory.name, place.tensor)
    wrong = type(place)(memory, begin, place.size, place.room)
    call = pair.caller.open_on_device(5, 2, ROW, wrong)
    assert call is not None
    pair.caller.post(call)
    with pytest.raises(DamagedMessage):
        pair.incoming()


def test_a_call_without_places_is_damaged(pair: Pair) -> None:
    call = pair.caller._caller.open(8, 1, 1)
    assert call is not None
    pair.caller._caller.post(call)
    with pytest.raises(DamagedMessage, match="8 bytes is too short"):
        pair.incoming()


def test_a_server_that_allows_none_refuses(tmp_path: Path) -> None:
    listener = Listener(f"unix:{tmp_path}/s", SECRET)
    try:
        with pytest.raises(ConnectionLost):
            connect(listener.address, SECRET, "cuda_ipc", HEAP)
    finally:
        listener.close()
    with pytest.raises(ConfigError, match="cuda_ipc needs unix:"):
        connect("tcp:127.0.0.1:1", SECRET, "cuda_ipc", HEAP)


def test_memory_is_freed_once_the_server_has_closed_it(gpu: Gpu, pair: Pair) -> None:
    pair.call()
    mine = gpu.exported[b"memory 1"]
    pair.caller.close()
    pair.caller.close()
    pair.departures.poll()
    assert len(pair.departures) == 1 and not mine.closed
    with pytest.raises(ConnectionLost):
        pair.answerer.poll()
    pair.answerer.close()
    assert all(memory.closed == 1 for memory in gpu.opened)
    pair.departures.poll()
    assert not len(pair.departures) and mine.closed == 1


def test_memory_that_a_server_cannot_close_is_kept(
    gpu: Gpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it has open is closed, and the connection ends. It does not say goodbye."""
    pair.call()
    first, second = gpu.opened

    def refused() -> None:
        raise ConfigError("the GPU is broken")

    first.close = refused  # type: ignore[method-assign]
    pair.answerer.close()
    assert second.closed == 1
    with pytest.raises(ConnectionLost):
        while True:
            pair.caller.poll()
    pair.caller.close()
    pair.departures.poll()
    assert len(pair.departures) == 1
    monkeypatch.setattr("moesaic.gpu.ipc.device_calls.LEAVING_SECONDS", 0.05)
    pair.departures.close()
    assert not gpu.exported[b"memory 1"].closed


def test_a_goodbye_that_was_read_before_counts(gpu: Gpu, pair: Pair) -> None:
    """The server closed the connection first, and its client noticed."""
    pair.call()
    pair.answerer.close()
    with pytest.raises(ConnectionLost):
        while True:
            pair.caller.poll()
    pair.caller.close()
    pair.departures.poll()
    assert not len(pair.departures) and gpu.exported[b"memory 1"].closed


def test_a_closed_socket_says_nothing_of_a_living_process() -> None:
    """Its GPU may still compute. When the process has ended, the GPU's work has, too."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        heap, departures = DeviceHeap(Gpu().export), Departures()
        departures.add(ours, b"!", os.pidfd_open(process.pid), heap)
        theirs.close()
        departures.poll()
        assert len(departures) == 1 and not heap.is_closed
        process.kill()
        until = time.monotonic() + PATIENCE
        while len(departures) and time.monotonic() < until:
            departures.poll()
        assert heap.is_closed
    finally:
        process.kill()
        process.communicate()


def test_a_client_that_ends_waits_a_moment_for_servers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.gpu.ipc.device_calls.LEAVING_SECONDS", 0.05)
    pair.call()
    pair.caller.close()
    pair.departures.close()
    assert not len(pair.departures) and not pair.heap.is_closed, "a server that stays keeps the memory"
    assert GOODBYE != b"!", "which wakes a peer"


def test_a_connection_that_comes_too_late_is_closed_at_once(pair: Pair) -> None:
    """A thread that connects may have made it while the client ended."""
    pair.departures.close()
    pair.caller.close()
    assert not len(pair.departures) and not pair.heap.is_closed


def test_memory_of_a_client_that_has_ended_is_a_lost_connection(
    gpu: Gpu, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its process lives, the GPUs cannot share memory, and the server says so. If it has opened memory
    of any client before, only this client is wrong."""
    ended = False

    def refused(name: bytes) -> Memory:
        raise ConfigError("the GPUs have no peer access")

    monkeypatch.setattr(pair.answerer, "_open_memory", refused)
    monkeypatch.setattr("moesaic.gpu.ipc.device_calls.has_ended", lambda process, seconds: ended)
    monkeypatch.setattr(DeviceAnswerer, "has_opened", False)
    with pytest.raises(ConfigError, match="no peer access"):
        pair.call()
    monkeypatch.setattr(DeviceAnswerer, "has_opened", True)
    with pytest.raises(DamagedMessage, match="no peer access"):
        pair.call()
    ended = True
    with pytest.raises(ConnectionLost, match="has ended"):
        pair.call()
    monkeypatch.undo()
