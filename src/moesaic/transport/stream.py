"""Messages as length-prefixed frames over a connected stream socket (Unix, or TCP in encrypted records).

A thread reads frames into an inbox as bytes arrive, so a sender never waits for a peer that is busy with a
step. It also notices the end of the stream at once, even while no thread calls `receive`.

A host that vanishes ends no stream. So on connections between hosts that thread also sends signs of life, and
gives up a peer that sends none (`silent_limit`). It counts turns in which nothing had arrived, not seconds:
when this process itself was stopped or slow, the peer's signs wait in the socket and count.

A frozen peer reads nothing. Bytes that the socket does not accept then wait in an outbox, so `send` never
blocks. A second thread sends them, and exists only while the outbox is not empty. While it exists, no other
thread sends. So the bytes of a socket, and the records of a sealed one, keep their order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
import typing
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.messages import Alive, Message
from moesaic.transport.sealed_socket import Wire

LOG = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
MAX_FRAME = 1 << 30
"""Maximum bytes of a frame. A longer one does not come from moesaic."""
MAX_UNSENT = 1 << 28
"""Bytes in the outbox above which a peer that reads nothing counts as gone."""
HEARTBEAT_SECONDS = 0.2
"""Seconds between two signs of life on connections that have them."""
_TYPES: tuple[type[Message], ...] = typing.get_args(messages.Message)
_CODE = {kind: bytes([index]) for index, kind in enumerate(_TYPES)}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]


class StreamConnection:
    """A Connection over `sock`, which belongs to it from now on.

    on_lost: called once in the reading thread when the peer is gone.
    on_message: called in that thread after each message, and at the end, when `receive` can return it.
    silent_limit: seconds without a byte after which the peer is gone. Both ends of such a connection send
    signs of life, which `receive` does not return. None: no signs of life, and no limit.
    """

    def __init__(
        self,
        sock: Wire,
        on_lost: Callable[[], None] | None = None,
        on_message: Callable[[], None] | None = None,
        silent_limit: float | None = None,
    ) -> None:
        self._socket = sock
        self._silent_limit = silent_limit
        self._silent_turns = 0
        """Turns of HEARTBEAT_SECONDS since something arrived."""
        self._beaten = 0.0
        """Time of the last sign of life that this end has sent."""
        self._on_lost = on_lost
        self._on_message = on_message
        self._inbox: queue.SimpleQueue[Message | ConnectionLost] = queue.SimpleQueue()
        self._loss: ConnectionLost | None = None
        """Why nothing more can be received, once `receive` has raised it."""
        self._sending = threading.Lock()
        """Protects `_outbox`, `_unsent_bytes` and `_send_failed`."""
        self._outbox: deque[memoryview] = deque()
        self._unsent_bytes = 0
        """Bytes in the outbox."""
        self._send_failed: str | None = None
        """Why nothing can be sent any more."""
        sock.setblocking(True)
        if silent_limit is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeout(HEARTBEAT_SECONDS))
        self._reader = threading.Thread(target=self._read, name="moesaic-transport", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Send `message`.

        A second thread sends what the socket does not accept at once, also when the process ends.
        """
        payload = encode(message)
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        with self._sending:
            if self._send_failed is not None:
                raise ConnectionLost(self._send_failed)
            if self._unsent_bytes > MAX_UNSENT:
                self._end(f"the other end has not read {self._unsent_bytes} bytes")
                self._shut_socket()
                raise ConnectionLost(self._send_failed)
            if not self._outbox:
                frame = frame[self._try(frame) :]
            if not len(frame):
                return
            self._outbox.append(frame)
            self._unsent_bytes += len(frame)
            if len(self._outbox) == 1:
                # Not a daemon thread: the process ends only when the peer has everything or is gone.
                threading.Thread(
                    target=self._write, args=(frame,), name="moesaic-outbox", daemon=False
                ).start()

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._loss is None:
            try:
                item = self._inbox.get(block=timeout != 0, timeout=timeout)
            except queue.Empty:
                return None
            if not isinstance(item, ConnectionLost):
                return item
            self._loss = item
        raise self._loss.copy()

    @property
    def loss_reason(self) -> str | None:
        """Why nothing more can be received. None until `receive` has raised it."""
        return None if self._loss is None else str(self._loss)

    @property
    def silence(self) -> float:
        """Seconds since something arrived, in steps of HEARTBEAT_SECONDS. 0 without a `silent_limit`."""
        return self._silent_turns * HEARTBEAT_SECONDS

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the peer sends nothing more. Waits at most `timeout` seconds for that."""
        self._reader.join(timeout)
        return not self._reader.is_alive()

    def close(self) -> None:
        """Close the socket and drop the outbox, which a frozen peer would never empty."""
        self._shut_socket()
        self._socket.close()

    def _shut_socket(self) -> None:
        """Shut the socket down, which wakes both threads."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer closed first

    def _try(self, frame: memoryview) -> int:
        """How many of these bytes the socket accepts without waiting. Raises ConnectionLost."""
        num_sent = 0
        try:
            while num_sent < len(frame):
                num_sent += self._socket.send(frame[num_sent:], socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # the socket is full
        except OSError as error:
            self._send_failed = f"the other end is gone: {error.strerror or error}"
            raise ConnectionLost(self._send_failed) from error
        return num_sent

    def _write(self, frame: memoryview) -> None:
        """Send the outbox, whose first entry is `frame`, waiting for the peer to read."""
        while True:
            try:
                self._socket.sendall(frame)
            except OSError as error:
                with self._sending:
                    self._end(f"the other end is gone: {error.strerror or error}")
                return
            with self._sending:
                if self._send_failed is not None:
                    return
                self._unsent_bytes -= len(self._outbox.popleft())
                if not self._outbox:
                    return
                frame = self._outbox[0]

    def _end(self, reason: str) -> None:
        """Stop sending. Messages that the peer sent before can still be received."""
        self._send_failed = self._send_failed or reason
        self._outbox.clear()
        self._unsent_bytes = 0

    def _read(self) -> None:
        """Read frames into the inbox until the stream ends."""
        try:
            while True:
                (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
                if length > MAX_FRAME:
                    raise ConnectionLost(f"the peer announced a frame of {length} bytes")
                message = decode(self._read_exactly(length))
                if self._silent_limit is None or not isinstance(message, Alive):
                    self._put(message)
        except ConnectionLost as lost:
            self._put(lost.copy())
        except OSError as error:
            self._put(ConnectionLost(f"the other end is gone: {error.strerror or error}"))
        except Exception as error:  # a bug in moesaic: `receive` must not wait without end
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
        num_filled = 0
        while num_filled < count:
            got = self._receive_into(buffer[num_filled:])
            if got == 0:
                raise ConnectionLost("the other end closed the connection")
            num_filled += got
        return buffer

    def _receive_into(self, view: memoryview) -> int:
        """Fill the beginning of `view`, and send signs of life meanwhile. Returns 0 at the stream's end."""
        if self._silent_limit is None:
            return self._socket.recv_into(view)
        while True:
            self._beat()
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:  # the timeout of the socket
                self._silent_turns += 1
                if self.silence >= self._silent_limit:
                    raise ConnectionLost(f"it sent nothing for {self._silent_limit:g} s") from None
            else:
                self._silent_turns = 0
                return got

    def _beat(self) -> None:
        """Send a sign of life if it is time for one."""
        now = time.monotonic()
        if now - self._beaten >= HEARTBEAT_SECONDS:
            self._beaten = now
            with contextlib.suppress(ConnectionLost):  # what the peer sent before can still be received
                self.send(Alive())


def end_process(connection: StreamConnection, reason: str) -> NoReturn:
    """Tell the other end what the user has to change, and end this process at once, from any thread.

    The exit code is that of a fault, so that a service manager starts a process of its own again.
    """
    LOG.error("%s; this process ends", reason)
    with contextlib.suppress(ConnectionLost):
        connection.send(messages.WorkerFailed(reason, user_error=True))
    os._exit(1)


def _timeout(seconds: float) -> bytes:
    """The value of SO_RCVTIMEO."""
    return struct.pack("@ll", int(seconds), round(seconds % 1 * 1e6))


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of Unix sockets: one for this process, the other for a child process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def encode(message: Message) -> bytes:
    """The payload of the frame that carries `message`: one byte for the type, then MessagePack.

    It uses no pickle, so no received code runs.
    """
    return _CODE[type(message)] + _ENCODER.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """The message in a payload.

    Raises ConnectionLost when it is no valid message: the peer is not moesaic.
    """
    code = payload[0] if len(payload) else len(_TYPES)
    if code >= len(_TYPES):
        raise ConnectionLost(f"the peer sent an unknown message type {code}")
    try:
        return _DECODERS[code].decode(payload[1:])
    except (msgspec.MsgspecError, MoesaicError, ValueError) as error:
        name = _TYPES[code].__name__
        raise ConnectionLost(f"the peer sent a damaged {name} message: {error}") from error
