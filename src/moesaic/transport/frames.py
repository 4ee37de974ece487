"""Reads and writes a connected stream socket without blocking and without a thread.

A generator describes what is read. It yields the memory to fill next and is resumed once that is full. So a
frame that arrives in pieces is a waiting generator, and bulk bytes are read directly into their destination.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from moesaic.core.errors import ConnectionLost
from moesaic.transport.sealed_socket import Wire

HEADER = struct.Struct("<IIQQQ")
"""kind, rows, call number, bytes of a row, bytes of the request; 32 bytes."""
REQUEST, ROWS = 1, 2
"""Kinds of frames. REQUEST: the request follows. ROWS: `rows` indices (u32) follow, then as many rows.
Rows have the bytes that the request asked for."""

READS = 64
"""Maximum reads of one `pump`, so that a peer which never stops sending does not delay others."""
PIECES = 64
"""Maximum pieces of memory in one system call."""

Buffers = Iterator[list[memoryview]]


class Frames:
    """A socket, which belongs to it. buffers: yields the memory to fill next, and may raise
    ConnectionLost."""

    def __init__(self, sock: Wire, buffers: Buffers) -> None:
        sock.setblocking(False)
        self.receive_error: ConnectionLost | None = None
        """Why nothing more can be received, or None."""
        self.has_more_bytes = False
        """Whether the last `pump` left something to read that the socket may not show."""
        self.unsent_bytes = 0
        """Bytes that the socket has not accepted yet."""
        self.pushed_bytes = 0
        """Bytes given to `push` so far."""
        self._socket = sock
        self._send_failed = False
        """Whether nothing more can be sent. Bytes that the peer sent before may still be received."""
        self._buffers = buffers
        self._pieces_to_fill: list[memoryview] = []
        self._outbox: deque[memoryview] = deque()
        self._advance(0)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The poll events to wait for: POLLIN, and POLLOUT while bytes are unsent."""
        return select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN

    def push(self, pieces: Sequence[memoryview]) -> bool:
        """Send these pieces after those that wait already.

        Pieces that the socket does not accept at once are kept without a copy, so they must not change.
        Returns False if nothing more can be sent.
        """
        for piece in pieces:
            if len(piece):
                self._outbox.append(piece)
                self.unsent_bytes += len(piece)
                self.pushed_bytes += len(piece)
        self.flush()
        return not self._send_failed

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self._outbox and not self._send_failed:
            try:
                num_sent = self._socket.sendmsg(
                    [self._outbox[i] for i in range(min(PIECES, len(self._outbox)))]
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._send_failed = True
                self._drop_outbox()
                return
            self.unsent_bytes -= num_sent
            while num_sent and num_sent >= len(self._outbox[0]):
                num_sent -= len(self._outbox.popleft())
            if num_sent:
                self._outbox[0] = self._outbox[0][num_sent:]

    def pump(self) -> None:
        """Send and receive what is possible now. The end of the stream, or a damaged frame, sets `lost`."""
        if self._outbox:
            self.flush()
        self.has_more_bytes = False
        if self.receive_error is not None:
            return
        try:
            for _ in range(READS):
                if not self._read():
                    return
            self.has_more_bytes = True
        except ConnectionLost as lost:
            self.receive_error = lost.copy()

    def close(self) -> None:
        self.receive_error = self.receive_error or ConnectionLost("this end is closed")
        self._send_failed = True
        self._drop_outbox()
        self._buffers = iter(())
        self._socket.close()

    def _read(self) -> bool:
        """Read once. Returns False if there was nothing to read."""
        try:
            count = self._socket.recvmsg_into(self._pieces_to_fill[:PIECES])[0]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ConnectionLost(f"the other end is gone: {error.strerror or error}") from None
        if count == 0:
            raise ConnectionLost("the other end closed the connection")
        self._advance(count)
        return True

    def _advance(self, count: int) -> None:
        """Record that `count` bytes arrived, and get the next memory to fill when the current one is full."""
        num_full = 0
        while num_full < len(self._pieces_to_fill) and count >= len(self._pieces_to_fill[num_full]):
            count -= len(self._pieces_to_fill[num_full])
            num_full += 1
        self._pieces_to_fill = self._pieces_to_fill[num_full:]
        if count:
            self._pieces_to_fill[0] = self._pieces_to_fill[0][count:]
        while not self._pieces_to_fill:
            self._pieces_to_fill = [piece for piece in next(self._buffers) if len(piece)]

    def _drop_outbox(self) -> None:
        self._outbox.clear()
        self.unsent_bytes = 0
