"""Accepting goes on after what would end it: no descriptors, no threads, peers that say nothing."""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.call_pairs import until

from moesaic.core.errors import ConnectionLost
from moesaic.transport import acceptor
from moesaic.transport.acceptor import Acceptor

RETRYING = "cannot accept at tcp:door: "


def password(sock: socket.socket) -> str:
    """A handshake: the peer's first word, which has to be a good one."""
    word = sock.recv(100).decode()
    sock.close()
    if not word.startswith("good"):
        raise ConnectionLost(f"it said {word!r}")
    return word


@contextmanager
def door(most: int = 2) -> Iterator[tuple[Callable[[], socket.socket], list[str], Acceptor[str]]]:
    """How to connect, and who was welcomed."""
    passed: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))
    where = listening.getsockname()
    one = Acceptor(listening, "tcp:door", password, passed.append, most)
    with ExitStack() as stack:
        stack.callback(one.close)
        yield lambda: stack.enter_context(socket.create_connection(where, 10.0)), passed, one


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(list(Path("/proc/self/fd").iterdir())) + 50
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        yield


def test_it_accepts_again_once_there_are_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    with door() as (_, passed, one), socket.socket() as peer:
        with no_descriptors():
            peer.connect(one._socket.getsockname())
            until(lambda: caplog.records)
        assert caplog.records[0].getMessage() == RETRYING + "Too many open files"
        peer.sendall(b"good peer")
        until(lambda: passed == ["good peer"])


def test_it_accepts_again_once_there_are_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    with door() as (connect, passed, _):
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", start)
            assert connect().recv(1) == b"", "nobody can greet it"
        until(lambda: caplog.records)
        assert caplog.records[0].getMessage() == RETRYING + "can't start new thread"
        connect().sendall(b"good peer")
        until(lambda: passed == ["good peer"])


def test_who_comes_takes_the_place_of_the_oldest(caplog: pytest.LogCaptureFixture) -> None:
    with door(most=2) as (connect, passed, _), caplog.at_level(logging.DEBUG):
        silent = [connect() for _ in range(4)]
        assert [sock.recv(1) for sock in silent[:2]] == [b"", b""]
        connect().sendall(b"good peer")
        until(lambda: passed == ["good peer"])
        silent[3].sendall(b"good but slow")
        until(lambda: passed == ["good peer", "good but slow"])
        names = ["tcp:{}:{}".format(*sock.getsockname()) for sock in silent]
    lines = [f"dropped {name} at tcp:door: it was the oldest of 2 handshakes" for name in names]
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == 2 and found[0] == lines[0]
    assert re.fullmatch(re.escape(lines[2]) + r" \(the last of 2 such lines in \d+ s\)", found[1])


def test_a_port_scan_is_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is forgotten: the lines count all of them, also those since the last line."""
    monkeypatch.setattr(acceptor, "QUIET_SECONDS", 0.05)
    count, began = 200, time.monotonic()
    with door() as (connect, passed, one):
        for number in range(count):
            connect().sendall(b"bad %d" % number)
            until(lambda number=number: one.num_dropped == number + 1)
        until(lambda: count_of(caplog) == count)  # while nobody else comes
        connect().sendall(b"good peer")
        until(lambda: passed == ["good peer"])
        for number in range(2):
            connect().sendall(b"bad")
            until(lambda number=number: one.num_dropped == count + number + 1)
    assert count_of(caplog) == count + 2, "what was held back is logged at the end"
    assert len(caplog.records) <= 4 + (time.monotonic() - began) / 0.05


def count_of(caplog: pytest.LogCaptureFixture) -> int:
    """How many peers the lines tell of."""
    counts = [re.search(r"last of (\d+) such", record.getMessage()) for record in caplog.records]
    return sum(1 if found is None else int(found[1]) for found in counts)


def test_closing_drops_who_is_not_done_and_welcomes_nobody() -> None:
    with door() as (connect, passed, one):
        silent = connect()
        until(lambda: one._pending)
        one.close()
        one.close()
        assert silent.recv(1) == b"" and not passed and not one._threads
        with pytest.raises(ConnectionRefusedError):
            connect()
