"""Calls over a stream socket (Unix, or TCP in encrypted records).

A request is sent once, and rows are sent as they are published.
frames.py describes the frames. The client never has more than `heap_bytes` in calls, and the server enforces
that. So the memory of both ends is bounded, whatever the other end does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.tokens import IntArray
from moesaic.transport.calls import MAX_CALLS, MAX_ROWS, Call, Incoming, Outstanding, refuse
from moesaic.transport.frames import HEADER, REQUEST, ROWS, Frames
from moesaic.transport.sealed_socket import Wire

_PER_ROW = HEADER.size + 4
"""Bytes in addition to a row that is published alone."""
_SMALLEST = 12
"""log2 of the bytes of the smallest block."""

Block = npt.NDArray[np.uint8]


def call_bytes(request_bytes: int, rows: int, row_bytes: int) -> int:
    """What a call uses of heap_bytes, whether its bytes are in memory or in the socket.

    >>> call_bytes(request_bytes=100, rows=2, row_bytes=10)
    192
    """
    return request_bytes + rows * (row_bytes + _PER_ROW)


def pieces(answer: memoryview, indices: IntArray, row_bytes: int) -> list[memoryview]:
    """The memory of these rows in order, with neighbouring rows as one piece.

    >>> [bytes(piece) for piece in pieces(memoryview(b"aabbccdd"), np.array([2, 3, 0]), row_bytes=2)]
    [b'ccdd', b'aa']
    """
    cuts = np.flatnonzero(np.diff(indices) != 1) + 1
    firsts = indices[np.concatenate(([0], cuts))] * row_bytes
    ends = (indices[np.concatenate((cuts, [len(indices)])) - 1] + 1) * row_bytes
    return [answer[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]


class StreamCall:
    """A call of a StreamCaller."""

    def __init__(self, number: int, request_bytes: int, rows: int, row_bytes: int, blocks: Blocks) -> None:
        self.number, self.rows, self.row_bytes = number, rows, row_bytes
        self._blocks = blocks.take(request_bytes), blocks.take(rows * row_bytes)
        self.request = self._blocks[0].data[:request_bytes]
        self.answer = self._blocks[1].data[: rows * row_bytes]
        self._outstanding = Outstanding(rows)
        """Rows that no received frame has listed yet."""
        self._num_missing = rows
        """Number of rows that have not arrived.

        Rows of the frame that is being read are listed but have not arrived.
        """
        self._state = "open"


class _StreamEnd:
    """The socket, and the behaviour that both ends share."""

    def __init__(self, sock: Wire, heap_bytes: int, buffers: Iterator[list[memoryview]]) -> None:
        """buffers: yields the memory for the next bytes that arrive."""
        self._heap_bytes = heap_bytes
        self._used_bytes = 0
        """Bytes of heap_bytes in calls that have unpublished rows."""
        self.blocks = Blocks(heap_bytes)
        self._header = memoryview(bytearray(HEADER.size))
        self._frames = Frames(sock, buffers)

    @property
    def events(self) -> int:
        return self._frames.events

    def fileno(self) -> int:
        return self._frames.fileno()

    def ready(self) -> bool:
        return self._frames.receive_error is not None or self._frames.has_more_bytes

    def arm(self) -> bool:
        return self.ready()

    def disarm(self) -> None:
        pass

    def close(self) -> None:
        self._frames.flush()
        self._frames.close()


class StreamCaller(_StreamEnd):
    """A Caller over `sock`, which belongs to it from now on."""

    def __init__(self, sock: Wire, heap_bytes: int) -> None:
        self._calls: dict[int, StreamCall] = {}
        self._number = 0
        self._news: list[tuple[Call, IntArray]] = []
        super().__init__(sock, heap_bytes, self._read_frames())

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        if self._frames.receive_error is not None:
            raise self._frames.receive_error.copy()
        size = call_bytes(request_bytes, rows, row_bytes)
        if min(request_bytes, row_bytes) < 0 or not 1 <= rows <= MAX_ROWS or size > self._heap_bytes:
            raise refuse(request_bytes, rows, row_bytes, self._heap_bytes)
        if len(self._calls) == MAX_CALLS or self._used_bytes + size > self._heap_bytes:
            return None
        self._used_bytes += size
        self._number += 1
        call = StreamCall(self._number, request_bytes, rows, row_bytes, self.blocks)
        self._calls[call.number] = call
        return call

    def post(self, call: Call) -> None:
        own_call = self._find_call(call)
        if own_call._state != "open":
            raise ValueError("the call was posted")
        if self._frames.receive_error is not None:
            raise self._frames.receive_error.copy()
        own_call._state = "posted"
        header = HEADER.pack(
            REQUEST, own_call.rows, own_call.number, own_call.row_bytes, len(own_call.request)
        )
        if not self._frames.push([memoryview(header), own_call.request]):
            raise ConnectionLost("the other end is gone")

    def poll(self) -> list[tuple[Call, IntArray]]:
        self._frames.pump()
        if not self._news:
            if self._frames.receive_error is not None:
                raise self._frames.receive_error.copy()
            return []
        news, self._news = self._news, []
        return news

    def release(self, call: Call) -> None:
        own_call = self._find_call(call)
        if own_call._state == "posted" and own_call._num_missing:
            own_call._state = "released"  # its rows still arrive
        else:
            self._end(own_call)

    def _find_call(self, call: Call) -> StreamCall:
        own_call = self._calls.get(call.number)
        if own_call is not call or own_call._state == "released":
            raise ValueError("the call was released")
        return own_call

    def _end(self, call: StreamCall) -> None:
        del self._calls[call.number]
        self._used_bytes -= call_bytes(len(call.request), call.rows, call.row_bytes)
        for block in call._blocks:
            self.blocks.give_back(block)

    def _read_frames(self) -> Iterator[list[memoryview]]:
        """Read ROWS frames. Rows are read directly into the answers."""
        while True:
            yield [self._header]
            kind, count, number, row_bytes, _ = HEADER.unpack(self._header)
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
            indices = row_numbers.astype(np.int64)
            yield pieces(call.answer, indices, call.row_bytes)
            self._deliver(call, indices)

    def _deliver(self, call: StreamCall, indices: IntArray) -> None:
        call._num_missing -= len(indices)
        if call._state != "released":
            self._news.append((call, indices))
        elif not call._num_missing:
            self._end(call)


class StreamIncoming:
    """A call of a StreamAnswerer."""

    def __init__(
        self, answerer: StreamAnswerer, number: int, request: tuple[Block, int], rows: int, row_bytes: int
    ) -> None:
        block, count = request
        self.number, self.rows, self.row_bytes = number, rows, row_bytes
        self._blocks = block, answerer.blocks.take(rows * row_bytes)
        self.request = block.data[:count].toreadonly()
        self.answer = self._blocks[1].data[: rows * row_bytes]
        self._outstanding = Outstanding(rows)
        self._answerer = answerer

    def publish(self, indices: IntArray) -> None:
        self._outstanding.take(indices)
        if len(indices):
            self._answerer.send(self, indices)


class StreamAnswerer(_StreamEnd):
    """An Answerer over `sock`, which belongs to it from now on."""

    def __init__(self, sock: Wire, heap_bytes: int) -> None:
        self._open: set[int] = set()
        self._retired_calls: deque[tuple[int, tuple[Block, Block]]] = deque()
        """(bytes pushed, memory) of finished calls. The memory is free once that many bytes were sent."""
        self._news: list[Incoming] = []
        super().__init__(sock, heap_bytes, self._read_frames())

    def poll(self) -> list[Incoming]:
        self._frames.pump()
        if not self._news:
            if self._frames.receive_error is not None:
                raise self._frames.receive_error.copy()
            return []
        news, self._news = self._news, []
        return news

    def send(self, call: StreamIncoming, indices: IntArray) -> None:
        """Send rows of a call, for `StreamIncoming.publish`."""
        if self._frames.receive_error is None:
            header = memoryview(HEADER.pack(ROWS, len(indices), call.number, call.row_bytes, 0))
            row_numbers = indices.astype("<u4").data.cast("B")
            self._frames.push([header, row_numbers, *pieces(call.answer, indices, call.row_bytes)])
        if not call._outstanding.count:
            self._open.discard(call.number)
            self._used_bytes -= call_bytes(len(call.request), call.rows, call.row_bytes)
            # The socket may still read from the answer, so its memory is not free yet.
            self._retired_calls.append((self._frames.pushed_bytes, call._blocks))

    def _read_frames(self) -> Iterator[list[memoryview]]:
        """Read REQUEST frames."""
        while True:
            yield [self._header]
            kind, rows, number, row_bytes, request_bytes = HEADER.unpack(self._header)
            size = call_bytes(request_bytes, rows, row_bytes)
            is_valid = kind == REQUEST and 1 <= rows <= MAX_ROWS and number not in self._open
            # The calls and the unsent answers of a client that reads its answers fit into its heap.
            if not is_valid or max(self._used_bytes + size, self._frames.unsent_bytes) > self._heap_bytes:
                raise DamagedMessage(f"the client sent a damaged frame (kind {kind}, call {number})")
            if len(self._open) == MAX_CALLS:
                raise DamagedMessage(f"the client sent more than {MAX_CALLS} calls")
            self._reuse()
            request = self.blocks.take(request_bytes)
            yield [request.data[:request_bytes]]
            self._used_bytes += size
            self._open.add(number)
            self._news.append(StreamIncoming(self, number, (request, request_bytes), rows, row_bytes))

    def _reuse(self) -> None:
        """Reuse the memory of calls whose answers the socket has accepted."""
        while (
            self._retired_calls
            and self._retired_calls[0][0] <= self._frames.pushed_bytes - self._frames.unsent_bytes
        ):
            for block in self._retired_calls.popleft()[1]:
                self.blocks.give_back(block)


class Blocks:
    """Memory blocks whose sizes are powers of two. At most `keep_bytes` of unused blocks are kept.

    Reusing a page costs nothing, while the first write to a new one causes a page fault.

    >>> blocks = Blocks(1 << 20)
    >>> first = blocks.take(5000)
    >>> len(first)
    8192
    >>> blocks.give_back(first)
    >>> blocks.take(6000) is first
    True
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0

    def take(self, count: int) -> Block:
        """A block of at least `count` bytes with arbitrary contents."""
        size = 1 << max(_SMALLEST, (count - 1).bit_length())
        idle = self._idle.get(size)
        if not idle:
            return np.empty(size, np.uint8)
        self._idle_bytes -= size
        return idle.pop()

    def give_back(self, block: Block) -> None:
        """Return a block, which may be reused and overwritten from now on."""
        if self._idle_bytes + len(block) > self._keep_bytes:
            self._idle.clear()
            self._idle_bytes = 0
        self._idle.setdefault(len(block), []).append(block)
        self._idle_bytes += len(block)
