"""What the tests of calls share: connected pairs of every kind, a server in another process, and waiting."""

from __future__ import annotations

import gc
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.transport.calls import Answerer, Call, Caller, End, Incoming
from moesaic.transport.listening import NIXL_KIND, Listener, connect
from moesaic.transport.nixl_link import INSTALL, available
from moesaic.transport.waiting import wait
from tests.support.fake_link import one_sided_pair
from tests.support.faulty_transport import Faults, FaultyCaller

SECRET = b"a secret of the tests"
HEAP = 64 << 20
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not available(), reason=INSTALL))
BETWEEN_PROCESSES = ("shm", "unix", "tcp", "faulty", NIXL)
KINDS = (*BETWEEN_PROCESSES, "fake link")
"""Kinds of pairs. That of NIXL needs UCX_TLS, such as UCX_TLS=tcp where there is no RDMA."""
TRANSPORT = {"shm": "shm", "faulty": "shm", "nixl": "nixl"}
"""Kind of pair -> kind of `connect`. Others have streams."""
ADDRESS = {"tcp": "tcp:127.0.0.1:0", "nixl": "tcp:127.0.0.1:0"}
PATIENCE = 60.0
"""Seconds after which a test counts as hanging."""


class Peer(Protocol):
    """The other end, which is polled too while a test waits."""

    def poll(self) -> Sequence[object]: ...


class Silent:
    """Takes the place of an end that does not exist or must not be polled."""

    def poll(self) -> list[object]:
        return []


def address_for(kind: str, folder: Path) -> str:
    return ADDRESS.get(kind, f"unix:{folder}/s")


def dial(kind: str, address: str, heap_bytes: int = HEAP) -> Caller:
    caller = connect(address, SECRET, TRANSPORT.get(kind, "stream"), heap_bytes)
    return FaultyCaller(caller, Faults(), seed=1) if kind == "faulty" else caller


@contextmanager
def pair(kind: str, folder: Path, heap_bytes: int = HEAP) -> Iterator[tuple[Caller, Answerer]]:
    """Both ends in this process."""
    if kind == "fake link":
        client, server = one_sided_pair(heap_bytes)
        yield client, server
        client.close()
        server.close()
        return
    listener = Listener(address_for(kind, folder), SECRET, kinds=NIXL_KIND)
    try:
        caller = dial(kind, listener.address, heap_bytes)
        answerer = accepted(listener)
    finally:
        listener.close()
    yield caller, answerer
    caller.close()
    answerer.close()


def accepted(listener: Listener) -> Answerer:
    """The next connection that is accepted."""
    assert wait([], [listener.fileno()], PATIENCE)
    (answerer,) = listener.take_connections()
    return answerer


@contextmanager
def process(role: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs tests/support/call_peer.py in another process and kills it at the end."""
    command = [sys.executable, str(Path(__file__).with_name("call_peer.py")), role, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    with child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str], *ends: End) -> str:
    """The next line of another process. Meanwhile the ends go on, but nothing is taken from them."""
    assert child.stdout is not None
    while ends and not select.select([child.stdout], [], [], 1e-3)[0]:
        for end in ends:
            end.ready()
    return child.stdout.readline().strip()


def until(done: Callable[[], object], *ends: End) -> None:
    """Waits on the ends until `done()`, which polls them. Fails after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "nothing happened"
        wait(ends, timeout=0.01)


def receive(caller: Caller, answerer: Peer | None = None, count: int = 1) -> list[tuple[Call, list[int]]]:
    """The next publications, at least `count`. The server's end is polled too, so that its bytes move."""
    found: list[tuple[Call, list[int]]] = []

    def done() -> bool:
        if answerer is not None:
            assert not answerer.poll()
        found.extend((call, rows.tolist()) for call, rows in caller.poll())
        return len(found) >= count

    until(done, caller)
    return found


def rows_of(caller: Caller, answerer: Peer, call: Call, count: int) -> list[int]:
    """The row indices of one call, exactly `count`."""
    rows: list[int] = []
    while len(rows) < count:
        for found, some in receive(caller, answerer):
            assert found is call
            rows += some
    return rows


def incoming(caller: Peer, answerer: Answerer, count: int = 1) -> list[Incoming]:
    """The next calls at the server. The client's end is polled too."""
    found: list[Incoming] = []

    def done() -> bool:
        assert not caller.poll()
        found.extend(answerer.poll())
        return len(found) >= count

    until(done, answerer)
    return found


def lost(end: Caller | Answerer) -> str:
    """Polls until the end is lost. Returns the reason."""
    reasons: list[str] = []

    def done() -> bool:
        try:
            end.poll()
        except ConnectionLost as error:
            reasons.append(str(error))
        return bool(reasons)

    until(done, end)
    return reasons[0]


def ask(caller: Caller, request: bytes, rows: int, row_bytes: int) -> Call:
    call = caller.open(len(request), rows, row_bytes)
    assert call is not None
    call.request[:] = request
    caller.post(call)
    return call


def descriptors() -> list[Path]:
    """The open files of this process."""
    gc.collect()
    return sorted(Path("/proc/self/fd").iterdir())


def noise(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)
