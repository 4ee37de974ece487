"""A sealed socket carries bytes like any other, and nothing of them can be read or changed on the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.call_pairs import accepted, noise

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.transport.calls import Incoming
from moesaic.transport.frames import READS
from moesaic.transport.listening import Listener, connect
from moesaic.transport.sealed_socket import SealedSocket, wire
from moesaic.transport.sealing import OVERHEAD, RECORD, Keys
from moesaic.transport.stream import StreamConnection
from moesaic.transport.waiting import wait

SECRET = b"a secret of the tests"
KEYS = Keys(bytes(range(32)), bytes(range(32, 64)))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def sealed_pair() -> tuple[SealedSocket, SealedSocket]:
    one, two = tcp_pair()
    return SealedSocket(one, KEYS), SealedSocket(two, KEYS.swap())


@pytest.fixture
def ends() -> Iterator[tuple[SealedSocket, socket.socket]]:
    """A sealed end, and the bare socket at the other one."""
    one, two = tcp_pair()
    two.settimeout(10.0)
    yield SealedSocket(one, KEYS), two
    one.close()
    two.close()


def taken(sock: SealedSocket, views: list[memoryview]) -> int:
    try:
        return sock.recvmsg_into(views)[0]
    except BlockingIOError:
        return 0


SIZES = st.one_of(st.integers(1, 300), st.integers(1, 4 * RECORD), st.sampled_from([RECORD, RECORD + 1]))


@settings(deadline=None, max_examples=8)
@given(st.lists(SIZES, min_size=1, max_size=12), st.lists(SIZES, min_size=1, max_size=12))
def test_bytes_arrive_whatever_the_pieces(pieces: list[int], views: list[int]) -> None:
    """Neither end blocks, so records are sent and read in parts."""
    one, two = sealed_pair()
    sent = noise(sum(pieces))
    cuts = np.cumsum([0, *pieces]).tolist()
    outbox = [memoryview(sent)[a:b] for a, b in pairwise(cuts)]
    got = memoryview(bytearray(len(sent)))
    filled, turn = 0, 0
    for sock in (one, two):
        sock.setblocking(False)
    while filled < len(sent):
        if outbox:
            try:
                count = one.sendmsg(outbox[:3])
            except BlockingIOError:
                count = 0
            while count:
                part = min(count, len(outbox[0]))
                outbox[0], count = outbox[0][part:], count - part
                if not len(outbox[0]):
                    outbox.pop(0)
        size = views[turn % len(views)]
        filled += taken(two, [got[filled : filled + size], got[filled + size : filled + 2 * size]])
        turn += 1
    assert bytes(got) == sent
    one.close()
    two.close()


def test_nothing_of_the_bytes_is_on_the_way(ends: tuple[SealedSocket, socket.socket]) -> None:
    end, bare = ends
    text = b"the prompt of a user" * 10
    end.sendall(memoryview(text))
    end.sendall(memoryview(text))
    found = b""
    while len(found) < 2 * (len(text) + OVERHEAD):
        found += bare.recv(10_000)
    assert text[:8] not in found
    assert found[: len(text) + OVERHEAD] != found[len(text) + OVERHEAD :], "equal bytes look different"


def test_a_record_that_is_sent_in_parts_is_sealed_once(ends: tuple[SealedSocket, socket.socket]) -> None:
    end, bare = ends
    end.setblocking(False)
    sealed: list[bytes] = []
    seal = end._sealer.seal

    def watched(plain: memoryview, into: memoryview) -> int:
        size = seal(plain, into)
        sealed.append(bytes(into[:size]))
        return size

    end._sealer.seal = watched  # type: ignore[method-assign]
    size = 64 * RECORD
    data, found, blocked = memoryview(noise(size)), bytearray(), 0
    bare.settimeout(0.05)
    while len(data) or len(found) < sum(map(len, sealed)):
        try:
            data = data[end.sendmsg([data]) :] if len(data) else data
        except BlockingIOError:
            blocked += 1
            found += bare.recv(1_000_003)
        if not len(data):
            found += bare.recv(1_000_003)
    assert blocked and bytes(found) == b"".join(sealed) and len(found) == size + len(sealed) * OVERHEAD


def test_the_end_of_a_stream_inside_a_record(ends: tuple[SealedSocket, socket.socket]) -> None:
    end, bare = ends
    whole = b""
    other, raw = tcp_pair()
    sender = SealedSocket(other, KEYS.swap())
    for text in (b"first", b"second"):
        sender.sendall(memoryview(text))
    other.close()
    while part := raw.recv(1000):
        whole += part
    raw.close()
    view = memoryview(bytearray(10))
    bare.sendall(whole[: len(b"first") + OVERHEAD + 30])
    bare.shutdown(socket.SHUT_WR)
    assert end.recv_into(view) == 5
    for _ in range(2):
        with pytest.raises(DamagedMessage, match="encrypted record 2 is damaged: the stream ended inside it"):
            end.recv_into(view)


def test_the_end_of_a_stream_between_records(ends: tuple[SealedSocket, socket.socket]) -> None:
    end, bare = ends
    SealedSocket(bare, KEYS.swap()).sendall(memoryview(b"all"))
    bare.shutdown(socket.SHUT_WR)
    view = memoryview(bytearray(10))
    assert [end.recv_into(view), end.recv_into(view), end.recv_into(view)] == [3, 0, 0]


def test_unix_sockets_are_used_as_they_are() -> None:
    one, two = socket.socketpair()
    assert wire(one, KEYS) is one
    near, far = tcp_pair()
    assert isinstance(wire(near, KEYS), SealedSocket)
    for sock in (one, two, near, far):
        sock.close()


def test_many_calls_at_once_are_all_noticed() -> None:
    """More than one `poll` reads. What is left is in memory, where the socket does not show it."""
    listener = Listener("tcp:127.0.0.1:0", SECRET)
    caller = connect(listener.address, SECRET)
    answerer = accepted(listener)
    count = 3 * READS
    for _ in range(count):
        call = caller.open(1, 1, 1)
        assert call is not None
        caller.post(call)
    found: list[Incoming] = []
    while len(found) < count:
        assert wait([answerer], timeout=20.0), "what has arrived is not noticed"
        found += answerer.poll()
    listener.close()
    caller.close()
    answerer.close()


def test_many_threads_send_over_one_connection() -> None:
    """Some messages wait in the outbox. Each arrives whole, and those of a thread in their order."""
    one, two = tcp_pair()
    for sock in (one, two):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = StreamConnection(SealedSocket(one, KEYS))
    receiver = StreamConnection(SealedSocket(two, KEYS.swap()))

    def send(thread: int) -> None:
        for turn in range(40):
            sender.send(messages.Cancel([thread, turn, *range(1 << 40, (1 << 40) + 500 * (turn % 7))]))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    last = [-1] * 4
    for _ in range(160):
        message = receiver.receive(20.0)
        assert isinstance(message, messages.Cancel)
        number, turn, *rest = message.request_ids
        assert turn == last[number] + 1 and len(rest) == 500 * (turn % 7)
        last[number] = turn
    for thread in threads:
        thread.join()
    sender.close()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        receiver.receive(20.0)
    receiver.close()
