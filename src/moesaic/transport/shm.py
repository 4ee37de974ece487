"""Calls through memory that both processes map: no copies, and no system calls while both are awake.

The client makes the memory (a memfd, sealed against shrinking) and sends it over the authenticated Unix
socket. The socket stays open. When it closes, the peer has died. A byte on it wakes a sleeping peer. Sending
that byte with MSG_DONTWAIT cannot block, whatever the peer does. An eventfd would not be safe, because its
flags are shared with the peer. One segment belongs to one connection and is freed with it. csrc/segment.h has
the layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.tokens import IntArray
from moesaic.transport import _shm
from moesaic.transport.calls import Call, Incoming, refuse

LOOK_SECONDS = 1e-3
"""An end whose `poll` finds nothing checks this often whether the peer is still alive."""
_PEER_GONE = "the other end closed the connection"


class _ShmEnd:
    """The socket beside the segment, and the errors that both ends share."""

    def __init__(self, sock: socket.socket, core: _shm.Client | _shm.Server) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._end = core
        self._loss: ConnectionLost | None = None
        self._next_look = 0.0
        self._last_byte = b""
        """The last byte that came by the socket."""

    events = select.POLLIN

    def fileno(self) -> int:
        return self._socket.fileno()

    def ready(self) -> bool:
        return self._loss is not None or self._end.ready()

    def arm(self) -> bool:
        return self._loss is not None or self._end.arm()

    def disarm(self) -> None:
        if self._loss is None:
            self._end.disarm()
            self._look()  # so that the same wakeup bytes do not wake it again

    def close(self) -> None:
        self._loss = self._loss or ConnectionLost("this end is closed")
        self._end.close()
        self._socket.close()

    @property
    def sock(self) -> socket.socket:
        """The socket beside the segment."""
        return self._socket

    def leave(self) -> tuple[socket.socket, bytes]:
        """Close this end but for its socket, which the caller closes. The peer notices as with `close`.

        Returns the socket, by which no more is sent, and the last byte that came by it.
        """
        self._loss = self._loss or ConnectionLost("this end is closed")
        self._end.close()
        with contextlib.suppress(OSError):  # the peer is gone
            self._socket.shutdown(socket.SHUT_WR)
        return self._socket, self._last_byte

    def say(self, byte: bytes) -> None:
        """Send one byte, which `leave` of the peer returns. It is lost if the peer is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(byte, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _idle(self) -> None:
        """Check for the peer when nothing was found. Raises ConnectionLost if nothing more can arrive."""
        if self._loss is None:
            now = time.monotonic()
            if now < self._next_look:
                return
            self._next_look = now + LOOK_SECONDS
            self._look()
        if self._loss is not None and not self._end.ready():
            raise self._loss.copy()

    def _look(self) -> None:
        """Read the wakeup bytes from the socket, and note whether it was closed."""
        try:
            received_bytes = self._socket.recv(4096)
            self._last_byte = received_bytes[-1:] or self._last_byte
            if not received_bytes:
                self._loss = ConnectionLost(_PEER_GONE)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._loss = ConnectionLost(f"the other end is gone: {error.strerror or error}")

    def _check(self) -> None:
        if self._loss is not None:
            raise self._loss.copy()

    def _close_with_error(self, error: Exception) -> ConnectionLost:
        self._loss = DamagedMessage(str(error))
        self._end.close()
        return self._loss.copy()


class ShmCaller(_ShmEnd):
    """A Caller on `mapping`, memory that its process made with `make_segment`. The socket belongs to it."""

    def __init__(self, sock: socket.socket, mapping: _shm.Mapping) -> None:
        self._client = _shm.Client(mapping, sock.fileno())
        super().__init__(sock, self._client)

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        self._check()
        try:
            return self._client.open(request_bytes, rows, row_bytes)
        except (ValueError, TypeError):
            raise refuse(request_bytes, rows, row_bytes, self._client.capacity) from None

    def post(self, call: Call) -> None:
        self._check()
        self._client.post(call)  # type: ignore[arg-type]

    def poll(self) -> list[tuple[Call, IntArray]]:
        try:
            news = self._client.poll()
        except _shm.Broken as error:
            raise self._close_with_error(error) from None
        if not news:
            self._idle()
        return news  # type: ignore[return-value]

    def release(self, call: Call) -> None:
        self._client.release(call)  # type: ignore[arg-type]


class ShmAnswerer(_ShmEnd):
    """An Answerer on a segment that arrived as the file descriptor `descriptor`, which the caller closes.

    The socket belongs to it from now on. Raises ConnectionLost if the memory cannot be trusted.
    """

    def __init__(self, sock: socket.socket, descriptor: int, heap_bytes: int) -> None:
        if os.fstat(descriptor).st_size != _shm.HEAP + heap_bytes:
            raise ConnectionLost("the client's memory has a different size than announced")
        try:
            self._server = _shm.Server(_shm.Mapping(descriptor), sock.fileno())
        except (_shm.Broken, ValueError, OSError) as error:
            raise ConnectionLost(f"the client's memory was refused: {error}") from None
        super().__init__(sock, self._server)

    def poll(self) -> list[Incoming]:
        try:
            news = self._server.poll()
        except _shm.Broken as error:
            raise self._close_with_error(error) from None
        if not news:
            self._idle()
        return news  # type: ignore[return-value]


def make_segment(heap_bytes: int) -> tuple[_shm.Mapping, int]:
    """Create memory for the calls of one connection. Returns it and its descriptor, which the caller closes.

    Pages are allocated when they are first touched.
    """
    descriptor = os.memfd_create("moesaic-calls", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, _shm.HEAP + heap_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return _shm.Mapping(descriptor), descriptor
    except OSError:
        os.close(descriptor)
        raise
