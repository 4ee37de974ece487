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

Wanted = Iterator[list[memoryview]]


class Frames:
    """A socket, which belongs to it. wanted: yields the memory to fill next, and may raise ConnectionLost."""

    def __init__(self, sock: Wire, wanted: Wanted) -> None:
        sock.setblocking(False)
        self.lost: ConnectionLost | None = None
        """Why nothing more can be received, or None."""
        self.more = False
        """Whether the last `pump` left something to read that the socket may not show."""
        self.unsent = 0
        """Bytes that the socket has not accepted yet."""
        self.pushed = 0
        """Bytes given to `push` so far."""
        self._socket = sock
        self._send_failed = False
        """Whether nothing more can be sent. Bytes that the peer sent before may still be received."""
        self._wanted = wanted
        self._into: list[memoryview] = []
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
                self.unsent += len(piece)
                self.pushed += len(piece)
        self.flush()
        return not self._send_failed

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self._outbox and not self._send_failed:
            try:
                sent = self._socket.sendmsg([self._outbox[i] for i in range(min(PIECES, len(self._outbox)))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._send_failed = True
                self._drop_outbox()
                return
            self.unsent -= sent
            while sent and sent >= len(self._outbox[0]):
                sent -= len(self._outbox.popleft())
            if sent:
                self._outbox[0] = self._outbox[0][sent:]

    def pump(self) -> None:
        """Send and receive what is possible now. The end of the stream, or a damaged frame, sets `lost`."""
        if self._outbox:
            self.flush()
        self.more = False
        if self.lost is not None:
            return
        try:
            for _ in range(READS):
                if not self._read():
                    return
            self.more = True
        except ConnectionLost as lost:
            self.lost = lost.copy()

    def close(self) -> None:
        self.lost = self.lost or ConnectionLost("this end is closed")
        self._send_failed = True
        self._drop_outbox()
        self._wanted = iter(())
        self._socket.close()

    def _read(self) -> bool:
        """Read once. Returns False if there was nothing to read."""
        try:
            count = self._socket.recvmsg_into(self._into[:PIECES])[0]
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
        done = 0
        while done < len(self._into) and count >= len(self._into[done]):
            count -= len(self._into[done])
            done += 1
        self._into = self._into[done:]
        if count:
            self._into[0] = self._into[0][count:]
        while not self._into:
            self._into = [piece for piece in next(self._wanted) if len(piece)]

    def _drop_outbox(self) -> None:
        self._outbox.clear()
        self.unsent = 0
