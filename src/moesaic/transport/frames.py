"""Reads and writes one connected stream socket without blocking and without a thread.

A generator says what is read: it yields the memory to be filled next and is resumed once that is full. A
frame that arrives in pieces is then a generator that waits, and bulk bytes are received where they will
stay.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from moesaic.core.errors import ConnectionLost

HEADER = struct.Struct("<IIQQQ")
"""kind, rows, call number, bytes of a row, bytes of the request: 32 bytes in all."""
REQUEST, ROWS = 1, 2
"""Kinds of frames. REQUEST: the request follows. ROWS: `rows` indices (u32) follow, then the rows."""

READS = 64
"""Maximum number of system calls of one `pump`, so that a peer which never stops sending delays nobody."""
PIECES = 64
"""Maximum number of pieces of memory in one system call."""

Wanted = Iterator[list[memoryview]]


class Frames:
    """One socket, which it owns. wanted: yields the memory to be filled next; it may raise ConnectionLost."""

    def __init__(self, sock: socket.socket, wanted: Wanted) -> None:
        sock.setblocking(False)
        self.lost: ConnectionLost | None = None
        """Why nothing more will arrive; None while the connection works."""
        self.unsent = 0
        """Bytes that the socket has not accepted yet."""
        self.pushed = 0
        """Bytes pushed so far."""
        self._socket = sock
        self._deaf = False
        """True if the peer accepts no more bytes. What it sent before may still be read."""
        self._wanted = wanted
        self._into: list[memoryview] = []
        self._outbox: deque[memoryview] = deque()
        self._advance(0)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        return select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN

    def push(self, pieces: Sequence[memoryview]) -> bool:
        """Send these pieces after what is waiting. What the socket does not accept is kept, not copied, and
        must not change.

        False if the peer accepts nothing more.
        """
        for piece in pieces:
            if len(piece):
                self._outbox.append(piece)
                self.unsent += len(piece)
                self.pushed += len(piece)
        self.flush()
        return not self._deaf

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self._outbox and not self._deaf:
            try:
                sent = self._socket.sendmsg([self._outbox[i] for i in range(min(PIECES, len(self._outbox)))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._deaf = True
                self._drop_outbox()
                return
            self.unsent -= sent
            while sent and sent >= len(self._outbox[0]):
                sent -= len(self._outbox.popleft())
            if sent:
                self._outbox[0] = self._outbox[0][sent:]

    def pump(self) -> None:
        """Send and receive what is possible now. The end of the stream or a damaged frame sets `lost`."""
        if self._outbox:
            self.flush()
        if self.lost is not None:
            return
        try:
            for _ in range(READS):
                if not self._read():
                    return
        except ConnectionLost as lost:
            self.lost = lost.again()

    def close(self) -> None:
        self.lost = self.lost or ConnectionLost("this end is closed")
        self._deaf = True
        self._drop_outbox()
        self._wanted = iter(())
        self._socket.close()

    def _read(self) -> bool:
        """Make one system call. False if there was nothing to read."""
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
        """`count` bytes have arrived. If the memory is full, ask for the next."""
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
