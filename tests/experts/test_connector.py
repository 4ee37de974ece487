"""Which way leads to a server: shared memory or a socket."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from tests.support.call_pairs import PATIENCE, SECRET

from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import ServerEntry
from moesaic.experts import connector
from moesaic.experts.connector import Connecting, Connector
from moesaic.transport.calls import Caller
from moesaic.transport.listening import Listener
from moesaic.transport.shm import ShmCaller
from moesaic.transport.sockets import StreamCaller
from moesaic.transport.waiting import wait
from moesaic.transport.wakeup import Wakeup


@pytest.mark.parametrize(
    ("transport", "address", "kind"),
    [
        ("shm", "unix:{}/s", ShmCaller),
        ("socket", "unix:{}/s", StreamCaller),
        ("shm", "tcp:127.0.0.1:0", StreamCaller),
        ("socket", "tcp:127.0.0.1:0", StreamCaller),
    ],
)
def test_the_way_to_a_server(
    transport: Literal["shm", "socket"], address: str, kind: type[Caller], tmp_path: Path
) -> None:
    listener, wakeup = Listener(address.format(tmp_path), SECRET), Wakeup()
    connecting = Connector(1 << 16, wakeup, transport)
    entry = ServerEntry(3, 1, listener.endpoint)
    try:
        connecting.start(entry, SECRET)
        assert wait([], [wakeup.fileno()], PATIENCE)
        [(found, caller)] = connecting.take_connections()
        assert found == entry and type(caller) is kind
        caller.close()
    finally:
        connecting.stop(3)
        listener.close()


class _Made:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_what_was_stopped_while_it_connected_is_closed_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller stops it just after its thread has seen that it is wanted."""
    seen, made, wakeup = threading.Event(), _Made(), Wakeup()

    class Late(threading.Event):
        def is_set(self) -> bool:
            found = super().is_set()
            if dialled.is_set():
                seen.set()
                super().wait(0.2)
            return found

    def dial(address: str, secret: bytes) -> _Made:
        dialled.set()
        return made

    dialled = threading.Event()
    connecting = Connecting(dial, wakeup)
    with monkeypatch.context() as patched:
        patched.setattr(connector, "threading", SimpleNamespace(Event=Late, Thread=threading.Thread))
        connecting.start(ServerEntry(3, 1, Endpoint("unix:@nobody")), b"")
    assert seen.wait(PATIENCE)
    connecting.stop(3)
    for _, found in connecting.take_connections():
        found.close()
    assert made.closed.wait(PATIENCE), "nobody closes it"
    wakeup.close()
