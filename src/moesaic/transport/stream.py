"""Length-prefixed frames over a connected stream socket (Unix or TCP).

A thread reads the socket into an inbox as bytes arrive, so a sender never waits for a peer that is busy
with a step. The end of the stream is noticed at once, even if nobody calls `receive`.

A frozen peer reads nothing. What the socket does not accept then waits in an outbox. A second thread
empties it and exists only as long as it is not empty, so `send` never blocks.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.transport import codec

_LENGTH = struct.Struct("<Q")
MAX_FRAME = 1 << 30
"""Maximum bytes of a frame. A longer frame is not a message of moesaic."""
MAX_UNSENT = 1 << 28
"""Bytes in the outbox at which a peer that reads nothing counts as gone."""


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
        """Lock for all fields below."""
        self._outbox: deque[memoryview] = deque()
        self._unsent = 0
        """Bytes in the outbox."""
        self._deaf: str | None = None
        """Why the peer accepts nothing any more; None while it does."""
        sock.setblocking(True)
        self._reader = threading.Thread(target=self._read, name="moesaic-transport", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send a message. What the peer does not accept at once is sent in the background, even if the
        process ends."""
        payload = codec.encode(message)
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        with self._sending:
            if self._deaf is not None:
                raise ConnectionLost(self._deaf)
            if self._unsent > MAX_UNSENT:
                self._end(f"the other end leaves {self._unsent} bytes untaken")
                self._shut()
                raise ConnectionLost(self._deaf)
            if not self._outbox:
                frame = frame[self._try(frame) :]
            if not len(frame):
                return
            self._outbox.append(frame)
            self._unsent += len(frame)
            if len(self._outbox) == 1:
                # Not a daemon: this process ends only after the peer has everything, or is gone.
                threading.Thread(
                    target=self._write, args=(frame,), name="moesaic-outbox", daemon=False
                ).start()

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._lost is None:
            try:
                item = self._inbox.get(block=timeout != 0, timeout=timeout)
            except queue.Empty:
                return None
            if not isinstance(item, ConnectionLost):
                return item
            self._lost = item
        raise self._lost.again()

    def ended(self, timeout: float) -> bool:
        """True if the peer has ended the stream, after waiting for that at most `timeout` seconds."""
        self._reader.join(timeout)
        return not self._reader.is_alive()

    def close(self) -> None:
        """Close the connection. The outbox is dropped: a frozen peer would never empty it."""
        self._shut()
        self._socket.close()

    def _shut(self) -> None:
        """Wake both threads."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer closed first

    def _try(self, frame: memoryview) -> int:
        """Number of these bytes that the socket accepts without waiting. Raises ConnectionLost."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._deaf = f"the other end is gone: {error.strerror or error}"
            raise ConnectionLost(self._deaf) from error

    def _write(self, frame: memoryview) -> None:
        """Send `frame`, the first in the outbox, and those behind it, waiting for the peer."""
        while True:
            try:
                self._socket.sendall(frame)
            except OSError as error:
                with self._sending:
                    self._end(f"the other end is gone: {error.strerror or error}")
                return
            with self._sending:
                if self._deaf is not None:
                    return
                self._unsent -= len(self._outbox.popleft())
                if not self._outbox:
                    return
                frame = self._outbox[0]

    def _end(self, why: str) -> None:
        """The peer accepts nothing any more. What it sent before may still be read."""
        self._deaf = self._deaf or why
        self._outbox.clear()
        self._unsent = 0

    def _read(self) -> None:
        """Read frames into the inbox until the stream ends, for whatever reason."""
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
                if length > MAX_FRAME:
                    raise ConnectionLost(f"the peer announced a frame of {length} bytes")
                self._put(codec.decode(self._read_exactly(length)))
        except ConnectionLost as lost:
            self._put(lost.again())
        except OSError as error:
            self._put(ConnectionLost(f"the other end is gone: {error.strerror or error}"))
        except Exception as error:  # a bug of moesaic: the receiver must not wait for ever
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
    """A connected pair of Unix sockets: one for this process, one for a child process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
