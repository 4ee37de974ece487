"""Bytes in and out of one connected stream socket that never blocks and has no thread.

What is read is told by a generator: it yields the memory to be filled next and is resumed once that is full,
so a frame that comes in pieces is a generator that waits, and bulk bytes land where they are to stay.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from moesaic.core.errors import ConnectionLost

HEADER = struct.Struct("<IIQQQ")
"""kind, rows, call number, bytes of a row, bytes of the request; 32 bytes."""
REQUEST, ROWS = 1, 2
"""Kinds. REQUEST: the request follows. ROWS: `rows` indices (u32) follow, then as many rows."""

READS = 64
"""System calls of one `pump` at most, so that a peer which never stops sending holds nobody up."""
PIECES = 64
"""Pieces of memory in one system call."""

Wanted = Iterator[list[memoryview]]


class Frames:
    """One socket, which it owns. wanted: yields what is to be filled next; it may raise ConnectionLost."""

    def __init__(self, sock: socket.socket, wanted: Wanted) -> None:
        sock.setblocking(False)
        self.lost: ConnectionLost | None = None
        """Why nothing comes any more."""
        self.unsent = 0
        """Bytes that the socket did not take yet."""
        self.pushed = 0
        """Bytes that were ever pushed."""
        self._socket = sock
        self._deaf = False
        """The peer takes no more bytes. What it sent before may still be there to be read."""
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
        """Send these after what waits already; what the socket does not take stays, unchanged and uncopied.

        False if the peer takes nothing any more.
        """
        for piece in pieces:
            if len(piece):
                self._outbox.append(piece)
                self.unsent += len(piece)
                self.pushed += len(piece)
        self.flush()
        return not self._deaf

    def flush(self) -> None:
        """Send as much as the socket takes."""
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
        """Send and receive what is possible now; the end of the stream or a damaged frame sets `lost`."""
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
        """One system call. False if there was nothing to read."""
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
        """`count` bytes arrived. Ask for what comes next if that was all."""
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
