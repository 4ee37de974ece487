"""Peers that passed the handshake and break the rules: the other end raises ConnectionLost only."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.call_pairs import lost

from moesaic.core.errors import ConnectionLost
from moesaic.transport import _shm
from moesaic.transport.calls import MAX_CALLS, MAX_ROWS, Answerer, End, Incoming
from moesaic.transport.frames import HEADER, REQUEST, ROWS
from moesaic.transport.shm import ShmAnswerer, ShmCaller, make_segment
from moesaic.transport.sockets import StreamAnswerer, StreamCaller

HEAP = 1 << 16
Stream = TypeVar("Stream", StreamAnswerer, StreamCaller)
FUZZ = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))

# Offsets in csrc/segment.h, in words of eight bytes.
POSTED, PUBLISHED, RING, TABLE, SLOT = 8, 24, 40, 512, 16
OFFSET, REQUEST_BYTES, N_ROWS, ROW_BYTES, SLOT_PUBLISHED = 1, 2, 3, 4, 8


class Segment:
    """Both ends on a segment, and the words of it, to be written by a hostile one."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        mapping, descriptor = make_segment(HEAP)
        self.caller = ShmCaller(near, mapping)
        self.answerer = ShmAnswerer(far, descriptor, HEAP)
        os.close(descriptor)
        self.bytes = np.frombuffer(memoryview(mapping), np.uint8)
        self.words = self.bytes.view(np.uint64)
        self.ring = self.bytes.view(np.uint32)[2 * RING : 2 * RING + MAX_CALLS]

    def post(self, slot: int = 0, **fields: int) -> None:
        """A descriptor like an honest one, save for `fields`."""
        values = {"offset": _shm.HEAP, "request_bytes": 8, "rows": 2, "row_bytes": 8} | fields
        at = TABLE + SLOT * min(slot, MAX_CALLS - 1)
        for field, word in zip(values, (OFFSET, REQUEST_BYTES, N_ROWS, ROW_BYTES), strict=True):
            self.words[at + word] = values[field]
        self.ring[int(self.words[POSTED]) % MAX_CALLS] = slot
        self.words[POSTED] += 1

    def close(self) -> None:
        self.caller.close()
        self.answerer.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    one = Segment()
    yield one
    one.close()


def test_the_tests_know_the_layout(segment: Segment) -> None:
    segment.post(slot=3, request_bytes=5, rows=4, row_bytes=3)
    (one,) = segment.answerer.poll()
    assert (len(one.request), one.rows, one.row_bytes, len(one.answer)) == (5, 4, 3, 12)
    call = segment.caller.open(1, 2, 4)
    assert call is not None
    segment.caller.post(call)
    segment.bytes.view(np.uint32)[(_shm.HEAP + 128) // 4] = 1
    segment.words[TABLE + SLOT_PUBLISHED] = 1
    segment.words[PUBLISHED] += 1
    assert [rows.tolist() for _, rows in segment.caller.poll()] == [[1]]


BAD = [
    {"slot": MAX_CALLS},
    {"slot": 2**32 - 1},
    {"offset": 0},
    {"offset": _shm.HEAP - 64},
    {"offset": _shm.HEAP + 4},
    {"offset": _shm.HEAP + HEAP},
    {"offset": _shm.HEAP + HEAP - 64},
    {"offset": 2**64 - 64},
    {"request_bytes": HEAP + 1},
    {"request_bytes": HEAP - 64},
    {"request_bytes": 2**64 - 1},
    {"rows": 0},
    {"rows": MAX_ROWS + 1},
    {"rows": MAX_ROWS, "row_bytes": 0},
    {"rows": HEAP // 8},
    {"rows": 2**63, "row_bytes": 2},
    {"row_bytes": HEAP // 2},
    {"row_bytes": 2**63},
    {"row_bytes": 2**64 - 1},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_a_descriptor_that_lies(segment: Segment, fields: dict[str, int]) -> None:
    segment.post(**fields)
    with pytest.raises(ConnectionLost, match="the client posted"):
        segment.answerer.poll()
    with pytest.raises(ConnectionLost):
        segment.answerer.poll()
    assert segment.answerer.ready()


def test_the_largest_descriptor_is_taken(segment: Segment) -> None:
    segment.post(request_bytes=HEAP - 128, rows=1, row_bytes=64)
    (one,) = segment.answerer.poll()
    one.answer[:] = b"x" * 64
    one.publish(np.array([0]))


def test_a_slot_posted_twice(segment: Segment) -> None:
    segment.post()
    segment.post()
    with pytest.raises(ConnectionLost, match="before all of its rows were published"):
        segment.answerer.poll()


@pytest.mark.parametrize("posted", [MAX_CALLS + 1, 2**63, 2**64 - 1])
def test_a_counter_that_jumps(segment: Segment, posted: int) -> None:
    segment.words[POSTED] = posted
    with pytest.raises(ConnectionLost, match="more calls than"):
        segment.answerer.poll()


def test_what_was_checked_is_not_read_again(segment: Segment) -> None:
    segment.post()
    (one,) = segment.answerer.poll()
    segment.words[TABLE : TABLE + 8] = 2**64 - 1
    one.answer[:] = bytes(16)
    one.publish(np.array([1, 0]))
    segment.post()
    assert len(segment.answerer.poll()) == 1


@pytest.mark.parametrize(
    ("count", "rows"),
    [(1, [2]), (1, [2**32 - 1]), (2, [0, 0]), (3, [0, 1, 0]), (2**64 - 1, [0]), (2**40, [0])],
)
def test_a_server_that_lies(segment: Segment, count: int, rows: list[int]) -> None:
    call = segment.caller.open(8, 2, 8)
    assert call is not None
    segment.caller.post(call)
    at = (_shm.HEAP + 128) // 4
    segment.bytes.view(np.uint32)[at : at + len(rows)] = rows
    segment.words[TABLE + SLOT_PUBLISHED] = count
    segment.words[PUBLISHED] += 1
    with pytest.raises(ConnectionLost, match="the server published"):
        segment.caller.poll()


def test_a_server_that_takes_rows_back(segment: Segment) -> None:
    call = segment.caller.open(8, 2, 8)
    assert call is not None
    segment.caller.post(call)
    (one,) = segment.answerer.poll()
    one.publish(np.array([1]))
    assert len(segment.caller.poll()) == 1
    segment.words[TABLE + SLOT_PUBLISHED] = 0
    segment.words[PUBLISHED] += 1
    with pytest.raises(ConnectionLost, match="the server published"):
        segment.caller.poll()


NEAR = st.one_of(
    st.integers(0, 300), st.integers(_shm.HEAP - 64, _shm.HEAP + HEAP + 64), st.integers(0, 2**64 - 1)
)


@pytest.mark.slow
@FUZZ
@given(st.lists(st.tuples(st.integers(0, 300), NEAR, NEAR, NEAR, NEAR), max_size=8))
def test_any_descriptors(posts: list[tuple[int, int, int, int, int]]) -> None:
    segment = Segment()
    size = _shm.HEAP + HEAP
    for slot, offset, request_bytes, rows, row_bytes in posts:
        segment.post(slot, offset=offset, request_bytes=request_bytes, rows=rows, row_bytes=row_bytes)
        try:
            calls = segment.answerer.poll()
        except ConnectionLost:
            break
        for one in calls:
            assert len(one.request) + one.rows * one.row_bytes + 4 * one.rows <= size - offset
            one.answer[:] = b"\xff" * len(one.answer)
            one.publish(np.arange(one.rows))
    segment.close()


@FUZZ
@given(
    st.lists(st.tuples(st.integers(0, _shm.HEAP + HEAP - 1), st.binary(min_size=1, max_size=64)), max_size=20)
)
def test_any_bytes_anywhere(writes: list[tuple[int, bytes]]) -> None:
    """Both ends use a segment that a third one scribbles over."""
    segment = Segment()
    try:
        for at, data in writes:
            end = min(at + len(data), len(segment.bytes))
            segment.bytes[at:end] = np.frombuffer(data[: end - at], np.uint8)
            call = segment.caller.open(100, 3, 7)
            if call is not None:
                segment.caller.post(call)
            for one in segment.answerer.poll():
                one.answer[:] = bytes(len(one.answer))
                one.publish(np.arange(one.rows))
            for found, rows in segment.caller.poll():
                assert rows.max() < found.rows
    except ConnectionLost:
        pass
    segment.close()


def stream(kind: Callable[[socket.socket, int], Stream]) -> tuple[socket.socket, Stream]:
    near, far = socket.socketpair()
    return near, kind(far, HEAP)


def frame(kind: int = REQUEST, rows: int = 1, number: int = 1, row_bytes: int = 4, length: int = 4) -> bytes:
    return HEADER.pack(kind, rows, number, row_bytes, length)


def serve(end: Answerer) -> int:
    """Answers what is there; how many calls that was."""
    calls = end.poll()
    for one in calls:
        one.publish(np.arange(one.rows))
    return len(calls)


@pytest.mark.parametrize(
    "data",
    [
        frame(kind=0),
        frame(kind=ROWS),
        frame(kind=2**32 - 1),
        frame(rows=0),
        frame(rows=MAX_ROWS + 1),
        frame(row_bytes=HEAP),
        frame(row_bytes=2**64 - 1),
        frame(rows=MAX_ROWS, row_bytes=2**60),
        frame(length=HEAP + 1),
        frame(length=2**64 - 1),
        frame() + b"abcd" + frame(),
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    ],
)
def test_a_damaged_request_frame(data: bytes) -> None:
    sock, end = stream(StreamAnswerer)
    sock.sendall(data)
    assert "the client sent a damaged frame" in lost(end)
    end.close()
    sock.close()


def test_more_calls_than_allowed() -> None:
    sock, end = stream(StreamAnswerer)
    for number in range(MAX_CALLS + 1):
        sock.sendall(frame(number=number) + b"abcd")
    assert "more than" in lost(end)
    sock.close()
    end.close()


def test_more_bytes_than_allowed() -> None:
    sock, end = stream(StreamAnswerer)
    for number in range(4):
        sock.sendall(frame(number=number, row_bytes=HEAP // 4) + b"abcd")
    assert "damaged" in lost(end)
    sock.close()
    end.close()


def test_a_client_that_never_reads_its_answers() -> None:
    """Its answers wait at the server up to its heap, then it is dropped."""
    sock, end = stream(StreamAnswerer)
    sock.settimeout(0.01)
    largest = 0
    with pytest.raises(ConnectionLost, match="damaged"):
        for number in range(1000):
            sock.sendall(frame(number=number, rows=1, row_bytes=HEAP // 4) + b"abcd")
            serve(end)
            largest = max(largest, end._frames.unsent_bytes)
    assert largest < 2 * HEAP
    sock.close()
    end.close()


@pytest.mark.parametrize(
    "data",
    [
        frame(kind=REQUEST),
        frame(kind=ROWS, number=2),
        frame(kind=ROWS, number=3),
        frame(kind=ROWS, rows=0),
        frame(kind=ROWS, rows=4),
        frame(kind=ROWS, rows=2) + struct.pack("<II", 1, 1),
        frame(kind=ROWS, rows=1) + struct.pack("<I", 3),
        frame(kind=ROWS, rows=1) + struct.pack("<I", 2**32 - 1),
        (frame(kind=ROWS, rows=1) + struct.pack("<I", 2) + b"abcd") * 2,
        frame(kind=ROWS, row_bytes=8) + struct.pack("<I", 2) + b"abcdefgh",
        frame(kind=ROWS, row_bytes=0) + struct.pack("<I", 2),
    ],
)
def test_a_damaged_answer_frame(data: bytes) -> None:
    sock, end = stream(StreamCaller)
    call, unposted = end.open(4, 3, 4), end.open(4, 3, 4)
    assert call is not None and unposted is not None and (call.number, unposted.number) == (1, 2)
    end.post(call)
    sock.sendall(data)
    assert "the server sent a damaged frame" in lost(end)
    sock.close()
    end.close()


def test_frames_in_pieces() -> None:
    sock, end = stream(StreamAnswerer)
    found: list[Incoming] = []
    for byte in frame(rows=3, length=5) + b"hello" + frame(number=2, length=0):
        sock.sendall(bytes([byte]))
        found += end.poll()
    assert [(bytes(one.request), one.rows, one.number) for one in found] == [(b"hello", 3, 1), (b"", 1, 2)]
    sock.sendall(frame(number=3)[:20])
    assert end.poll() == []
    sock.close()
    assert "closed the connection" in lost(end)
    end.close()


@FUZZ
@given(st.lists(st.one_of(st.binary(max_size=80), st.builds(frame, *[st.integers(0, 40)] * 5)), max_size=6))
def test_any_frames(parts: list[bytes]) -> None:
    sock, server = stream(StreamAnswerer)
    feed(sock, server, parts, lambda: serve(server))
    sock, client = stream(StreamCaller)
    call = client.open(1, 3, 4)
    assert call is not None
    client.post(call)
    feed(sock, client, parts, client.poll)


def feed(sock: socket.socket, end: End, parts: list[bytes], look: Callable[[], object]) -> None:
    try:
        for part in parts:
            sock.sendall(part)
            look()
    except ConnectionLost:
        pass
    sock.close()
    end.close()
