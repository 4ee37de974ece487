"""Length-prefixed frames over a connected stream socket (Unix or TCP).

A thread drains the socket into an inbox as bytes arrive, so a sender never waits for a peer that
is busy with a step. The end of the stream is seen at once, also while nobody calls `receive`.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.transport import codec

_LENGTH = struct.Struct("<Q")
MAX_FRAME = 1 << 30
"""Bytes. A longer frame is no message of ours."""


class StreamConnection:
    """A Connection over `sock`, which it owns from now on.

    on_lost: called once in the reading thread when the peer is gone. on_message: called there after each
    message, and at the end, once `receive` would return it.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_lost: Callable[[], None] | None = None,
        on_message: Callable[[], None] | None = None,
    ) -> None:
        self._socket = sock
        self._on_lost = on_lost
        self._on_message = on_message
        self._inbox: queue.SimpleQueue[Message | ConnectionLost] = queue.SimpleQueue()
        self._lost: ConnectionLost | None = None
        self._sending = threading.Lock()
        sock.setblocking(True)
        self._reader = threading.Thread(target=self._read, name="moesaic-transport", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        payload = codec.encode(message)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ConnectionLost(f"the other end is gone: {error.strerror or error}") from error

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._lost is not None:
            raise self._lost
        try:
            item = self._inbox.get(block=timeout != 0, timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, ConnectionLost):
            self._lost = item
            raise item
        return item

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer closed first
        self._socket.close()

    def _read(self) -> None:
        """Frames into the inbox until the stream ends, for whatever reason."""
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
                if length > MAX_FRAME:
                    raise ConnectionLost(f"the peer announced a frame of {length} bytes")
                self._put(codec.decode(self._read_exactly(length)))
        except ConnectionLost as lost:
            self._put(lost)
        except OSError as error:
            self._put(ConnectionLost(f"the other end is gone: {error.strerror or error}"))
        except Exception as error:  # a bug of ours: whoever receives must not wait for ever
            self._put(ConnectionLost(f"reading failed: {error!r}"))
            raise
        if self._on_lost is not None:
            self._on_lost()

    def _put(self, item: Message | ConnectionLost) -> None:
        self._inbox.put(item)
        if self._on_message is not None:
            self._on_message()

    def _read_exactly(self, count: int) -> memoryview:
        buffer = memoryview(bytearray(count))
        filled = 0
        while filled < count:
            got = self._socket.recv_into(buffer[filled:])
            if got == 0:
                raise ConnectionLost("the other end closed the connection")
            filled += got
        return buffer


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of Unix sockets: keep one, hand the other to a child process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
