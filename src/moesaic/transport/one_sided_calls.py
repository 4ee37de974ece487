"""Calls by one-sided writes (nixl_link.py), beside an authenticated and encrypted TCP connection.

A call has the same place in the areas of both ends: the request, then the answer. The client chooses it.
The client writes the request into the server's area, and the server writes rows into the client's area:

    REQUEST, rows, number, bytes of a row, bytes of the request, place, write
    ROWS, rows, number, bytes of a row, 0, 0, write      then the indices (u32)

These frames travel over the TCP connection. They wake a sleeping peer, and their end is that of the peer.
`write` is the number of the write that carries the bytes, or 0 if there are none. A frame counts once both
the frame and its write have arrived. Then frames count in the order in which they were sent.

The written bytes are neither encrypted nor authenticated by moesaic. Both ends check frames as sockets.py
does.
When a process dies, writes that had not ended are lost, also those of rows that it had published.
"""

from __future__ import annotations

import bisect
import select
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.tokens import IntArray
from moesaic.transport.authentication import Deadline
from moesaic.transport.calls import MAX_CALLS, MAX_ROWS, Call, Incoming, Outstanding, refuse
from moesaic.transport.frames import REQUEST, ROWS, Frames
from moesaic.transport.nixl_link import NixlLink
from moesaic.transport.sealed_socket import Wire

HEADER = struct.Struct("<IIQQQQQ")
ALIGNMENT = 64
"""Calls begin at multiples of so many bytes of the area."""
AWAKE_SECONDS = 2e-3
"""A process stays awake while a write moves. After so long without progress it naps between two looks."""
NAP_SECONDS = 5e-4
LATE_SECONDS = 0.2
"""How long writes may still arrive after the end of the connection."""

News = TypeVar("News")


class Places:
    """Gives out parts of an area: the first that is large enough.

    >>> places = Places(256)
    >>> places.take(100), places.take(100), places.take(1)
    (0, 128, None)
    >>> places.give_back(0, 100)
    >>> places.take(10)
    0
    """

    def __init__(self, size: int) -> None:
        self._free = [(0, size // ALIGNMENT * ALIGNMENT)]
        """(begin, end) in order, with something in use between any two."""

    def take(self, count: int) -> int | None:
        """The beginning of `count` bytes, or None if no part is large enough."""
        count = _round_up(count)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= count:
                self._free[index : index + 1] = [(begin + count, end)] if end - begin > count else []
                return begin
        return None

    def give_back(self, begin: int, count: int) -> None:
        """The part may be given out again."""
        end = begin + _round_up(count)
        index = bisect.bisect(self._free, (begin, end))
        # Free neighbours become one part, or the area would fragment.
        first, last = index, index
        if index and self._free[index - 1][1] == begin:
            first, begin = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            last, end = index + 1, self._free[index][1]
        self._free[first:last] = [(begin, end)]


def _round_up(count: int) -> int:
    return max(ALIGNMENT, -(-count // ALIGNMENT) * ALIGNMENT)


class _End(Generic[News]):
    """The socket and the link, and the behaviour that both ends share."""

    def __init__(self, sock: Wire, link: NixlLink, buffers: Iterator[list[memoryview]]) -> None:
        self._link = link
        self._header = memoryview(bytearray(HEADER.size))
        self._pending_news: deque[tuple[int, News]] = deque()
        """(write, news) of frames whose writes may still be under way, in order."""
        self._news: list[News] = []
        self._numbers = 0
        """Number of writes so far."""
        self._progress_time = 0.0
        """Time of the last progress."""
        self._late_deadline = 0.0
        """Time at which the wait for writes ends after the connection has ended."""
        self._frames = Frames(sock, buffers)

    events = select.POLLIN

    def fileno(self) -> int:
        return self._frames.fileno()

    def ready(self) -> bool:
        self._look()
        return bool(self._news) or self._frames.has_more_bytes or self._is_finished()

    def arm(self) -> bool:
        if self.ready():
            return True
        if not (self._pending_news or self._link.writing or self._frames.unsent_bytes):
            return False
        if time.monotonic() - self._progress_time > AWAKE_SECONDS:
            time.sleep(NAP_SECONDS)  # nothing would wake this process when a write moves
        return True

    def disarm(self) -> None:
        pass

    def close(self) -> None:
        self._frames.flush()
        self._frames.close()
        self._link.close()
        self._pending_news.clear()

    def _take_news(self) -> list[News]:
        """What has arrived since the last time. Raises ConnectionLost if nothing more can arrive."""
        self._frames.pump()
        self._look()
        if not self._news and self._is_finished():
            self._check()
        news, self._news = self._news, []
        return news

    def _look(self) -> None:
        """Go on with writes under way, and with frames whose writes have arrived."""
        if (self._pending_news or self._link.writing) and self._link.pump():
            self._progress_time = time.monotonic()
        while self._pending_news and (
            not self._pending_news[0][0] or self._link.take(self._pending_news[0][0])
        ):
            self._deliver(self._pending_news.popleft()[1])

    def _deliver(self, news: News) -> None:
        self._news.append(news)

    def _is_finished(self) -> bool:
        """Whether the connection has ended and no write can arrive any more."""
        if self._frames.receive_error is None and self._link.failure is None:
            return False
        if not self._pending_news:
            return True
        now = time.monotonic()
        self._late_deadline = self._late_deadline or now + LATE_SECONDS
        return now >= self._late_deadline

    def _check(self) -> None:
        """Raises ConnectionLost if the connection or the link has ended."""
        if self._frames.receive_error is not None:
            raise self._frames.receive_error.copy()
        if self._link.failure is not None:
            raise ConnectionLost(self._link.failure)

    def _expect(self, write: int, news: News) -> None:
        self._pending_news.append((write, news))
        self._progress_time = time.monotonic()

    def _write(self, begin: int, pieces: list[tuple[int, int]]) -> int:
        """Begin to write parts of the area that are counted from `begin`. Returns the number of the write."""
        parts = [(begin + first, begin + last) for first, last in pieces if last > first]
        if not parts:
            return 0
        self._numbers += 1
        self._progress_time = time.monotonic()
        self._link.write(self._numbers, parts)
        return self._numbers


class OneSidedCall:
    """A call of a OneSidedCaller."""

    def __init__(self, number: int, sizes: tuple[int, int, int], place: int, memory: memoryview) -> None:
        request_bytes, self.rows, self.row_bytes = sizes
        self.number, self.place, self.size = number, place, len(memory)
        self.request, self.answer = memory[:request_bytes], memory[request_bytes:]
        self._outstanding = Outstanding(self.rows)
        """Rows that no frame has listed yet."""
        self._num_missing = self.rows
        """Number of rows that have not arrived."""
        self._state = "open"


class OneSidedCaller(_End[tuple[Call, IntArray]]):
    """A Caller over `sock` and `link`, which belong to it from now on."""

    def __init__(self, sock: Wire, link: NixlLink) -> None:
        self._places = Places(len(link.area))
        self._calls: dict[int, OneSidedCall] = {}
        self._number = 0
        super().__init__(sock, link, self._read_frames())

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        self._check()
        size, area = request_bytes + rows * row_bytes, self._link.area
        if min(request_bytes, row_bytes) < 0 or not 1 <= rows <= MAX_ROWS or size > len(area):
            raise refuse(request_bytes, rows, row_bytes, len(area))
        if len(self._calls) == MAX_CALLS:
            return None
        place = self._places.take(size)
        if place is None:
            return None
        self._number += 1
        sizes = request_bytes, rows, row_bytes
        call = OneSidedCall(self._number, sizes, place, area[place : place + size])
        self._calls[call.number] = call
        return call

    def post(self, call: Call) -> None:
        own_call = self._find_call(call)
        if own_call._state != "open":
            raise ValueError("the call was posted")
        self._check()
        own_call._state = "posted"
        count = len(own_call.request)
        write = self._write(own_call.place, [(0, count)])
        sizes = own_call.rows, own_call.number, own_call.row_bytes, count
        if not self._frames.push([memoryview(HEADER.pack(REQUEST, *sizes, own_call.place, write))]):
            raise ConnectionLost("the other end is gone")
        self._link.settle(write)

    def poll(self) -> list[tuple[Call, IntArray]]:
        return self._take_news()

    def release(self, call: Call) -> None:
        own_call = self._find_call(call)
        self._news = [news for news in self._news if news[0] is not own_call]
        if own_call._state == "posted" and own_call._num_missing:
            own_call._state = "released"  # its rows still arrive
        else:
            self._end_call(own_call)

    def _find_call(self, call: Call) -> OneSidedCall:
        own_call = self._calls.get(call.number)
        if own_call is not call or own_call._state == "released":
            raise ValueError("the call was released")
        return own_call

    def _end_call(self, call: OneSidedCall) -> None:
        del self._calls[call.number]
        self._places.give_back(call.place, call.size)

    def _deliver(self, news: tuple[Call, IntArray]) -> None:
        call = self._calls[news[0].number]
        call._num_missing -= len(news[1])
        if call._state != "released":
            self._news.append(news)
        elif not call._num_missing:
            self._end_call(call)

    def _read_frames(self) -> Iterator[list[memoryview]]:
        """Read ROWS frames."""
        while True:
            yield [self._header]
            kind, count, number, row_bytes, _, _, write = HEADER.unpack(self._header)
            call = self._calls.get(number)
            is_known = kind == ROWS and call is not None and call._state != "open"
            if not is_known or call is None or not 1 <= count <= call._outstanding.count:
                raise DamagedMessage(f"the server sent a damaged frame (kind {kind}, call {number})")
            if row_bytes != call.row_bytes:
                requested_text = f"call {number} asked for rows of {call.row_bytes}"
                raise DamagedMessage(
                    f"the server sent a damaged frame (rows of {row_bytes} bytes; {requested_text})"
                )
            row_numbers = np.empty(count, "<u4")
            yield [row_numbers.data.cast("B")]
            try:
                call._outstanding.take(row_numbers)
            except ValueError as error:
                raise DamagedMessage(f"the server sent a damaged frame: {error}") from None
            self._expect(write, (call, row_numbers.astype(np.int64)))


class OneSidedIncoming:
    """A call of a OneSidedAnswerer."""

    def __init__(
        self, answerer: OneSidedAnswerer, number: int, sizes: tuple[int, int, int], memory: memoryview
    ) -> None:
        request_bytes, self.rows, self.row_bytes = sizes
        self.number = number
        self.request, self.answer = memory[:request_bytes].toreadonly(), memory[request_bytes:]
        self._outstanding = Outstanding(self.rows)
        self._answerer = answerer

    def publish(self, indices: IntArray) -> None:
        self._outstanding.take(indices)
        if len(indices):
            self._answerer.send(self, indices)


class OneSidedAnswerer(_End[Incoming]):
    """An Answerer over `sock` and `link`, which belong to it from now on."""

    def __init__(self, sock: Wire, link: NixlLink) -> None:
        self._open: dict[int, int] = {}
        """Number of a call that is not finished -> where its answer begins in the area."""
        super().__init__(sock, link, self._read_frames())

    def poll(self) -> list[Incoming]:
        return self._take_news()

    def send(self, call: OneSidedIncoming, indices: IntArray) -> None:
        """Write rows of a call, for `OneSidedIncoming.publish`."""
        if self._frames.receive_error is None and self._link.failure is None:
            pieces = _pieces(indices, call.row_bytes)
            write = self._write(self._open[call.number], pieces)
            header = HEADER.pack(ROWS, len(indices), call.number, call.row_bytes, 0, 0, write)
            self._frames.push([memoryview(header), indices.astype("<u4").data.cast("B")])
            self._link.settle(write)
        if not call._outstanding.count:
            self._open.pop(call.number, None)

    def _read_frames(self) -> Iterator[list[memoryview]]:
        """Read REQUEST frames."""
        while True:
            yield [self._header]
            kind, rows, number, row_bytes, request_bytes, place, write = HEADER.unpack(self._header)
            size, area = request_bytes + rows * row_bytes, self._link.area
            is_valid = kind == REQUEST and 1 <= rows <= MAX_ROWS and number not in self._open
            if not is_valid or place + size > len(area):
                raise DamagedMessage(f"the client sent a damaged frame (kind {kind}, call {number})")
            if len(self._open) == MAX_CALLS:
                raise DamagedMessage(f"the client sent more than {MAX_CALLS} calls")
            self._open[number] = place + request_bytes
            sizes = request_bytes, rows, row_bytes
            self._expect(write, OneSidedIncoming(self, number, sizes, area[place : place + size]))


def _pieces(indices: IntArray, row_bytes: int) -> list[tuple[int, int]]:
    """The (begin, end) of these rows in order, with neighbouring rows as one piece.

    >>> _pieces(np.array([2, 3, 0]), row_bytes=10)
    [(20, 40), (0, 10)]
    """
    parts = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return [(int(part[0]) * row_bytes, (int(part[-1]) + 1) * row_bytes) for part in parts]


def meet(sock: Wire, heap_bytes: int, first: bool, deadline: Deadline) -> NixlLink:
    """The link beside an authenticated connection. Both ends call it, `first` at the client.

    Raises ConnectionLost or OSError.
    """
    link = NixlLink(heap_bytes)
    try:
        link.meet(sock, first, deadline)
    except BaseException:
        link.close()
        raise
    return link
