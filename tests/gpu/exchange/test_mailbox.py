"""Both ends of a mailbox, with real sockets. What a device would write is written into the words by hand."""

from __future__ import annotations

import fcntl
import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moesaic.core.errors import ConfigError, ConnectionLost, DamagedMessage
from moesaic.gpu.exchange import mailbox
from moesaic.gpu.exchange.mailbox import (
    ANSWER,
    AWAKE,
    DOUBT,
    HEAD,
    PAGE,
    REQUEST,
    MailboxClient,
    MailboxServer,
    accept_mailbox,
    connect_mailbox,
    mailbox_kind,
)
from moesaic.transport.authentication import Deadline
from moesaic.transport.listening import Listener
from moesaic.transport.waiting import wait

SECRET = b"a secret of the tests"
NAMES = b"rows and answers"


class Opened:
    """An Answerer of a mailbox."""

    def __init__(self, end: MailboxServer) -> None:
        self.end = end

    def __getattr__(self, name: str) -> object:
        return getattr(self.end, name)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[MailboxClient, MailboxServer]]:
    listener = Listener(f"unix:{tmp_path}/s", SECRET, kinds=mailbox_kind(Opened))  # type: ignore[arg-type]
    client = connect_mailbox(listener.address, SECRET, 5000, NAMES)
    [answerer] = until(listener.take_connections)
    yield client, answerer.end  # type: ignore[attr-defined]
    client.close()
    answerer.close()
    listener.close()


def until(found: Callable[[], list[object]]) -> list[object]:
    end = time.monotonic() + 60
    while not (some := found()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return some


def post(client: MailboxClient, number: int) -> None:
    client.memory[:HEAD].view(np.int64)[REQUEST] = number


def test_a_request_and_its_answer(ends: tuple[MailboxClient, MailboxServer]) -> None:
    client, server = ends
    assert server.names == NAMES and len(client.memory) == HEAD + 2 * PAGE
    assert server.take() is None and not server.ready()
    client.memory[HEAD : HEAD + 5] = np.frombuffer(b"hello", np.uint8)
    post(client, 7)
    assert server.ready() and server.take() == 7 and bytes(server.request[:5]) == b"hello"
    assert server.take() is None and (client.request_number, client.answer_number) == (7, 0)
    server.answer(7)
    assert client.answer_number == 7
    post(client, 11)
    assert server.take() == 11


def test_doubts_are_told_once(ends: tuple[MailboxClient, MailboxServer]) -> None:
    client, server = ends
    assert not client.doubts()
    server.doubt()
    assert client.doubts() and not client.doubts()


def test_a_second_request_before_the_answer_is_damaged(ends: tuple[MailboxClient, MailboxServer]) -> None:
    client, server = ends
    post(client, 1)
    assert server.take() == 1
    post(client, 2)
    with pytest.raises(DamagedMessage, match="before the last one was answered"):
        server.take()


def test_a_server_sleeps_only_while_its_client_rests(
    ends: tuple[MailboxClient, MailboxServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = ends
    assert not wait([server], (), 0.0) and not server.arm()
    client.wake()
    assert server.arm() and wait([server], (), 5.0)
    naps: list[float] = []
    monkeypatch.setattr(mailbox.time, "sleep", naps.append)
    monkeypatch.setattr(mailbox, "AWAKE_SECONDS", 0.0)
    assert server.arm() and naps, "without requests it naps between two looks"
    client.clear_awake()
    server.disarm()
    assert not server.arm()


@pytest.mark.parametrize("who", [0, 1])
def test_the_end_of_a_process_is_noticed(ends: tuple[MailboxClient, MailboxServer], who: int) -> None:
    stays, goes = ends[1 - who], ends[who]
    assert stays.look(force=True)
    goes.close()
    assert select.select([stays.fileno()], [], [], 5)[0]
    assert not stays.look(force=True)
    if isinstance(stays, MailboxServer):
        with pytest.raises(ConnectionLost):
            stays.take()


def test_a_client_that_leaves_waits_for_the_server(ends: tuple[MailboxClient, MailboxServer]) -> None:
    """Until then the server may write an answer, so the client keeps the memory."""
    client, server = ends
    client.leave()
    assert not client.has_server_left
    server.disarm()
    with pytest.raises(ConnectionLost):
        server.take()
    server.close()
    assert client.has_server_left


def test_a_listener_without_devices_refuses(tmp_path: Path) -> None:
    listener = Listener(f"unix:{tmp_path}/s", SECRET)
    with pytest.raises(ConnectionLost):
        connect_mailbox(listener.address, SECRET, 100, NAMES)
    with pytest.raises(ConfigError, match="unix: for a mailbox"):
        connect_mailbox("tcp:127.0.0.1:9", SECRET, 100, NAMES)
    listener.close()


def sent(descriptor: int, length: int = len(NAMES)) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"+"], [descriptor])
        ours.sendall(length.to_bytes(4, "little") + NAMES)
        accept_mailbox(theirs, Deadline(5))


def test_memory_that_may_change_its_size_is_refused() -> None:
    """A client that shrank it later would crash the server."""
    plain = os.memfd_create("plain")
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    for descriptor in (plain, sealed):
        os.ftruncate(descriptor, HEAD + PAGE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ConnectionLost, match="its size may change"):
        sent(plain)
    with pytest.raises(ConnectionLost, match="too long"):
        sent(sealed, 1 << 20)
    sent(sealed)
    os.close(plain)
    os.close(sealed)


def test_each_word_has_a_line_of_its_own() -> None:
    words = REQUEST, ANSWER, AWAKE, DOUBT
    assert all(later - word >= 64 // 8 for word, later in itertools.pairwise(words))
