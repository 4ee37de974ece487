"""What a large call copies besides what shared memory copies too: a record, and bytes into and out of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.call_pairs import incoming, noise, pair, until

from moesaic.transport.calls import Call, Incoming
from moesaic.transport.sealed_socket import SMALL
from moesaic.transport.sealing import RECORD, Opener, Sealer
from moesaic.transport.sockets import StreamAnswerer, StreamCaller

LARGE = 9 << 20
ROWS = 3


class Bytes:
    """Counts the bytes that were read or written in each of the watched pieces of memory."""

    def __init__(self) -> None:
        self.used: list[memoryview] = []

    def within(self, memory: memoryview) -> int:
        whole = np.frombuffer(memory, np.uint8)
        return sum(len(one) for one in self.used if np.shares_memory(whole, np.frombuffer(one, np.uint8)))

    @property
    def total(self) -> int:
        return sum(map(len, self.used))


class Watched:
    """A socket, and the memory that it sent from and received into."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self.sent, self.received = sock, Bytes(), Bytes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        count = self._socket.sendmsg(pieces)
        _note(self.sent, pieces, count)
        return count

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        count = self._socket.recvmsg_into(views)[0]
        _note(self.received, views, count)
        return (count,)


def _note(found: Bytes, pieces: Sequence[memoryview], count: int) -> None:
    for piece in pieces:
        found.used.append(piece[:count])
        count -= len(found.used[-1])


def one_call(caller: StreamCaller, answerer: StreamAnswerer) -> tuple[Call, Incoming]:
    """A call with a large request and a large answer, which come back row after row."""
    call = caller.open(LARGE, ROWS, LARGE // ROWS)
    assert call is not None
    call.request[:] = noise(LARGE)
    caller.post(call)
    [got] = incoming(caller, answerer)
    got.answer[:] = got.request
    got.publish(np.array([0]))
    got.publish(np.array([1, 2]))
    rows: list[int] = []

    def done() -> bool:
        assert not answerer.poll()
        for _, some in caller.poll():
            rows.extend(some.tolist())
        return len(rows) == ROWS

    until(done, caller)
    assert call.answer == got.request == call.request
    return call, got


def test_a_plain_socket_sends_and_receives_without_any_copy() -> None:
    one, two = (Watched(sock) for sock in socket.socketpair())
    caller, answerer = StreamCaller(one, 64 << 20), StreamAnswerer(two, 64 << 20)  # type: ignore[arg-type]
    call, got = one_call(caller, answerer)
    assert one.sent.within(call.request) == two.received.within(got.request) == LARGE
    assert two.sent.within(got.answer) == one.received.within(call.answer) == LARGE
    caller.close()
    answerer.close()


def test_tcp_encrypts_from_where_bytes_lie_and_decrypts_to_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a record at the beginning of each frame is copied, since it has the frame's header too."""
    sealed, opened = Bytes(), Bytes()
    seal, open_ = Sealer.seal, Opener.open

    def watched_seal(self: Sealer, plain: memoryview, into: memoryview) -> int:
        sealed.used.append(plain)
        return seal(self, plain, into)

    def watched_open(self: Opener, record: memoryview, into: memoryview) -> None:
        opened.used.append(into)
        open_(self, record, into)

    monkeypatch.setattr(Sealer, "seal", watched_seal)
    monkeypatch.setattr(Opener, "open", watched_open)
    with pair("tcp", tmp_path) as (caller, answerer):
        assert isinstance(caller, StreamCaller) and isinstance(answerer, StreamAnswerer)
        call, got = one_call(caller, answerer)
        for found, request, answer in (
            (sealed, call.request, got.answer),
            (opened, got.request, call.answer),
        ):
            assert LARGE - SMALL <= found.within(request) < LARGE
            assert LARGE - 2 * SMALL <= found.within(answer) < LARGE  # two frames
        assert sealed.total == opened.total
        assert max(map(len, sealed.used)) == RECORD, "with many bytes, records are large"
        assert len(sealed.used) < 2 * LARGE // SMALL // 3
        sealed.used.clear()
        small = caller.open(3 * SMALL, 1, 1)
        assert small is not None
        caller.post(small)
        incoming(caller, answerer)
        assert max(map(len, sealed.used)) == SMALL, "with few bytes, records are small"
