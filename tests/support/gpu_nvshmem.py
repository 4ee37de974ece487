"""NVSHMEM on the device of `gpu_sanitizer`: processes write into each other's memory by TCP (`tcp_heap`).

`nvshmem` puts it in the place of `gpu.nvshmem.symmetric_heap.jobs`, and of what `gpu.triton.nvshmem` gives
kernels. Triton's interpreter has one thread at a time run a kernel. So two processes of a job whose kernels
wait for each other cannot be threads of one process here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from moesaic.core.errors import ConfigError
from tests.support.gpu_sanitizer import STREAM, OnDevice
from tests.support.tcp_heap import LATE, TcpHeap, exactly

ADDRESS = "_MOESAIC_NVSHMEM_ADDRESS"
"""The environment variable with the address of this host, for the process that begins a job."""
NAME_BYTES = 128
"""Of a job's name, as NVSHMEM's have."""
PATIENCE = 60.0
"""Seconds in which all processes must join."""
_TOKEN = 16
_JOINS = struct.Struct("<iI")
"""The number of a process that joins, and its port."""


class NvshmemByTcp:
    """SymmetricJobs of one process."""

    def __init__(self, late: float = LATE, seed: int = 0) -> None:
        """late: seconds after which the sources of puts are read, at most. seed: of delays and orders."""
        self._late, self._seed = late, seed
        self._begun: dict[bytes, socket.socket] = {}
        self.heap: StandInHeap | None = None

    def unique_id(self) -> bytes:
        token = secrets.token_hex(_TOKEN // 2).encode()
        self._begun[token] = _listen(os.environ.get(ADDRESS, "127.0.0.1"))
        host, port = self._begun[token].getsockname()
        return token + f"{host}:{port}".encode().ljust(NAME_BYTES - _TOKEN, b"\0")

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> StandInHeap:
        if len(unique_id) != NAME_BYTES:
            raise _refused(f"a name of {len(unique_id)} bytes; this version's have {NAME_BYTES}")
        if self.heap is not None:
            raise _refused("this process is in a job already")
        assert 0 <= pe < pes and (pe == 0) == (unique_id[:_TOKEN] in self._begun), f"process {pe} of {pes}"
        below = TcpHeap(pe, size, self._late, self._seed)
        try:
            connect = self._connect_first if pe == 0 else _connect_other
            connect(unique_id, below, pes)
        except OSError as error:
            for connection in below.connections.values():
                connection.close()
            raise _refused(f"process {pe} of {pes}: not all of them have joined: {error}") from None
        below.start()
        self.heap = StandInHeap(below)
        _HEAPS.append(below)
        return self.heap

    def _connect_first(self, unique_id: bytes, heap: TcpHeap, pes: int) -> None:
        """Tell all others where they are, and let them go once they are connected."""
        places, joined = {}, heap.connections
        with self._begun.pop(unique_id[:_TOKEN]) as listening:
            while len(joined) < pes - 1:
                pe, port, connection = _accepted(listening, unique_id[:_TOKEN])
                assert 0 < pe < pes and pe not in joined, f"process {pe} of {pes} joins"
                places[pe], joined[pe] = f"{connection.getpeername()[0]}:{port}", connection
        known = ",".join(places[pe] for pe in range(1, pes)).encode()
        for connection in joined.values():
            connection.sendall(struct.pack("<I", len(known)) + known)
        for connection in joined.values():
            exactly(connection, 1)
        for connection in joined.values():
            connection.sendall(b"g")
            _settled(connection)

    def close(self) -> None:
        """End this process's part in its job, as if the process ended."""
        for listening in self._begun.values():
            listening.close()
        if self.heap is not None:
            self.heap.below.close()
            _HEAPS.remove(self.heap.below)


def _connect_other(unique_id: bytes, heap: TcpHeap, pes: int) -> None:
    """Meet the first process, and connect to those of lower numbers. Those of higher ones connect to this."""
    token, (host, _, port) = unique_id[:_TOKEN], unique_id[_TOKEN:].rstrip(b"\0").decode().rpartition(":")
    first = heap.connections[0] = _reached(host, int(port), token)
    with _listen(first.getsockname()[0]) as listening:
        first.sendall(_JOINS.pack(heap.pe, listening.getsockname()[1]))
        (size,) = struct.unpack("<I", exactly(first, 4))
        places = exactly(first, size).decode().split(",")
        for pe in range(1, heap.pe):
            where, _, there = places[pe - 1].rpartition(":")
            heap.connections[pe] = _reached(where, int(there), token)
            heap.connections[pe].sendall(_JOINS.pack(heap.pe, 0))
        while len(heap.connections) < pes - 1:
            pe, _, connection = _accepted(listening, token)
            heap.connections[pe] = connection
    first.sendall(b"r")
    exactly(first, 1)
    for connection in heap.connections.values():
        _settled(connection)


def _listen(host: str) -> socket.socket:
    listening = socket.create_server((host, 0))
    listening.settimeout(PATIENCE)
    return listening


def _reached(host: str, port: int, token: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), PATIENCE)
    connection.sendall(token)
    return connection


def _accepted(listening: socket.socket, token: bytes) -> tuple[int, int, socket.socket]:
    """The number, the port and the connection of the next process that knows the token."""
    while True:
        connection, _ = listening.accept()
        connection.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            if exactly(connection, _TOKEN) == token:
                pe, port = _JOINS.unpack(exactly(connection, _JOINS.size))
                return pe, port, connection
        connection.close()


def _settled(connection: socket.socket) -> None:
    """Of a process that has joined: it may be silent for as long as it likes."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class StandInHeap:
    """SymmetricHeap. `below` has what is in the memory now; the device has its own view of it."""

    def __init__(self, below: TcpHeap) -> None:
        self.below, self.pe = below, below.pe
        self.tensor: torch.Tensor = OnDevice(torch.from_numpy(below.memory))

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        _in_order("a put")
        self.below.put(target, source, size, signal, number, pe, copied=True)

    def await_signal(self, signal: int, number: int) -> None:
        found = self.below.word(signal)
        assert found == number, f"the word at {signal} is {found}, not {number}: a GPU would wait for ever"

    def quiet(self) -> None:
        _in_order("quiet")
        self.below.quiet()


def _in_order(what: str) -> None:
    """What the thread told its stream before comes first."""
    if STREAM.capture is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what} of NVSHMEM")
    STREAM.drain()


# ---- what kernels call in Triton's interpreter

_HEAPS: list[TcpHeap] = []
"""Of this process. Tests may have several."""


def put_signal(target: Any, source: Any, size: Any, signal: Any, number: Any, pe: Any) -> None:
    at = [_scalar(one) for one in (target, source, signal)]
    heap = _heap_at(at[0])
    to, begin, word = (one - heap.address for one in at)
    heap.put(to, begin, _scalar(size), word, _scalar(number), _scalar(pe))


def at_least(words: Any, numbers: Any) -> Any:
    places, wanted = np.broadcast_arrays(words.handle.data, numbers.handle.data)
    found = np.zeros(places.shape, np.bool_)
    for lane, place in np.ndenumerate(places):
        heap = _heap_at(int(place))
        found[lane] = heap.word(int(place) - heap.address) >= int(wanted[lane]) % (1 << 64)
    if not found.all():
        time.sleep(1e-5)  # who spins would keep the interpreter from the threads that receive
    kind = tl.block_type(tl.int1, list(words.shape)) if words.shape else tl.int1
    return tl.tensor(TensorHandle(found, tl.int1), kind)


def _heap_at(address: int) -> TcpHeap:
    for heap in _HEAPS:
        if heap.address <= address < heap.address + len(heap.memory):
            return heap
    raise AssertionError(f"{address:#x} is not in the symmetric heap")


def _scalar(one: Any) -> int:
    """The number of a scalar of the interpreter."""
    if isinstance(one, tl.constexpr):
        return int(one.value)
    return int(one.handle.data.item()) if isinstance(one, tl.tensor) else int(one)


@contextlib.contextmanager
def nvshmem(late: float = LATE, seed: int = 0) -> Iterator[NvshmemByTcp]:
    """Within it this process may join a job on the device. Gives its SymmetricJobs."""
    jobs = NvshmemByTcp(late, seed)
    taken: list[tuple[str, Any]] = [("moesaic.gpu.nvshmem.symmetric_heap.jobs", lambda device: jobs)]
    taken += [(f"moesaic.{name}.check_installed", lambda: None) for name in CHECKS]
    taken += [(f"moesaic.gpu.triton.nvshmem.{name}", call) for name, call in CALLS.items()]
    with contextlib.ExitStack() as patches:
        for name, value in taken:
            patches.enter_context(mock.patch(name, value))
        try:
            yield jobs
        finally:
            jobs.close()


CALLS = {"put_signal": put_signal, "at_least": at_least}
CHECKS = ("gpu.nvshmem.symmetric_heap", "gpu.nvshmem.package")
"""Modules that ask whether NVSHMEM is installed."""


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--transport nvshmem: {reason}")
