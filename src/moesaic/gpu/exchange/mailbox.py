"""Passes one request at a time through words in memory, which a device may write without a system call.

The client makes a segment of whole pages, sealed against changes of its size, and sends it over the
authenticated Unix socket:

    request word, answer word, awake word, doubt word      8 bytes each, in cache lines of their own
    the request, from byte HEAD on

A request is there when the request word changes, and answered when the answer word is the same number. Its
rows are elsewhere: the client names that memory when it connects. A device cannot write to a socket. So the
client's host sets the awake word and writes a byte before the device may post, and clears the word
afterwards. Meanwhile the server polls and does not sleep. When a process dies its socket closes.

The server sets the doubt word before it answers with numbers that the client should look at.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError, ConnectionLost, DamagedMessage
from moesaic.gpu.ipc.device_calls import GOODBYE, has_ended
from moesaic.transport import address as addresses
from moesaic.transport.address import peer_process
from moesaic.transport.authentication import Deadline, Terms, read_exactly
from moesaic.transport.calls import MIN_HEAP, Answerer
from moesaic.transport.listening import HANDSHAKE_SECONDS, Accept, ProvenPeer, dial

PAGE = 4096
HEAD = PAGE
REQUEST, ANSWER, AWAKE, DOUBT = 0, 8, 16, 24
"""Words of 8 bytes."""
MOST_NAME_BYTES = 1 << 16
LOOK_SECONDS = 1e-3
"""An end whose word has not changed checks this often whether the peer is still alive."""
AWAKE_SECONDS, NAP_SECONDS = 0.1, 5e-4
"""A server that was told to stay awake naps between two looks after so long without a request."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_OK = b"+"
KIND = "mailbox"
"""The kind of these connections, see `authentication.KINDS`."""
_CLOSED_REASON = "the other end closed the connection"


class _MailboxEnd:
    """The socket beside the segment, and the words."""

    def __init__(self, sock: socket.socket, descriptor: int) -> None:
        self._socket = sock
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        """[size] the segment."""
        self._words: npt.NDArray[np.int64] = self.memory[:HEAD].view(np.int64)
        self._next_look = 0.0
        self._last_byte, self._is_closed = b"", False
        self.loss: ConnectionLost | None = None
        """Why the peer is gone, once that is known."""

    events = select.POLLIN

    @property
    def request_number(self) -> int:
        """The number of the last request."""
        return int(self._words[REQUEST])

    @property
    def answer_number(self) -> int:
        """The number of the last answer."""
        return int(self._words[ANSWER])

    @property
    def request(self) -> memoryview:
        """The memory of requests. The peer may change it at any time."""
        return memoryview(self._map)[HEAD:]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket, which the peer notices. The segment lives as long as somebody looks at it."""
        self.loss = self.loss or ConnectionLost("this end is closed")
        self._is_closed = True
        self._socket.close()

    def look(self, force: bool = False) -> bool:
        """Whether the peer is there, as was known LOOK_SECONDS ago at most. force: as is known now."""
        now = time.monotonic()
        if self.loss is None and (force or now >= self._next_look):
            self._next_look = now + LOOK_SECONDS
            self._read()
        return self.loss is None

    def _read(self) -> bool:
        """Read what woke this end from the socket, and note whether it was closed. False: nothing came."""
        try:
            message = self._socket.recv(4096)
            self._last_byte = message[-1:] or self._last_byte
            if not message or message.endswith(GOODBYE):
                self.loss = ConnectionLost(_CLOSED_REASON)
            return bool(message)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.loss = ConnectionLost(f"the other end is gone: {error.strerror or error}")
            return False


class MailboxClient(_MailboxEnd):
    """The end of the client, whose device writes requests and reads the answer word."""

    def __init__(self, sock: socket.socket, descriptor: int) -> None:
        super().__init__(sock, descriptor)
        self._process = os.pidfd_open(peer_process(sock))

    @property
    def has_server_left(self) -> bool:
        """Whether the server reads and writes nothing more.

        It said goodbye, or its process has ended. The socket alone does not show it: it closes before the
        work of a process on its GPU has ended.
        """
        while self._read():
            pass
        return self._last_byte == GOODBYE or has_ended(self._process)

    def close(self) -> None:
        if not self._is_closed:
            os.close(self._process)
        super().close()

    def wake(self) -> None:
        """Tell the server to poll from now on."""
        self._words[AWAKE] = 1
        try:
            self._socket.send(_OK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it is readable already
        except OSError as error:
            self.loss = ConnectionLost(f"the other end is gone: {error.strerror or error}")

    def doubts(self) -> bool:
        """Whether the server had doubts since the last call."""
        has_doubts = bool(self._words[DOUBT])
        self._words[DOUBT] = 0
        return has_doubts

    def clear_awake(self) -> None:
        """No request comes before the next `wake`."""
        self._words[AWAKE] = 0

    def leave(self) -> None:
        """Post no more. `left` says when the server has noticed."""
        self.clear_awake()
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._read()


class MailboxServer(_MailboxEnd):
    """The end of the server. It is an `End` for `waiting.wait`; who uses it makes an Answerer of it."""

    def __init__(self, sock: socket.socket, descriptor: int, names: bytes) -> None:
        """names: of memory, as the client sent them."""
        super().__init__(sock, descriptor)
        self.names = names
        self._last_request = self.request_number
        self._news = 0.0
        """Time of the last request."""

    def close(self, goodbye: bool = True) -> None:
        """Say goodbye and close the socket. goodbye: the client's memory is closed."""
        if goodbye:
            with contextlib.suppress(OSError):  # the client is gone
                self._socket.send(GOODBYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        super().close()

    def ready(self) -> bool:
        return self.loss is not None or self.request_number != self._last_request

    def arm(self) -> bool:
        """A device posts without a wakeup, so there may be news at any time while the client says so."""
        if self.ready():
            return True
        if not self._words[AWAKE]:
            return False
        if time.monotonic() - self._news > AWAKE_SECONDS:
            time.sleep(NAP_SECONDS)
        return True

    def disarm(self) -> None:
        self.look(force=True)

    def take(self) -> int | None:
        """The number of a new request, if there is one. Raises ConnectionLost when the client is gone."""
        number = self.request_number
        if number != self._last_request:
            if self.answer_number != self._last_request:
                raise DamagedMessage("a client posted a request before the last one was answered")
            self._last_request, self._news = number, time.monotonic()
            return number
        if not self.look() and self.loss is not None:
            raise self.loss.copy()
        return None

    def doubt(self) -> None:
        """The client should look at the answer that comes."""
        self._words[DOUBT] = 1

    def answer(self, number: int) -> None:
        """This request is answered: everything that belongs to the answer is where the client's device sees
        it."""
        self._words[ANSWER] = number


def make_mailbox(sock: socket.socket, request_bytes: int, names: bytes, deadline: Deadline) -> MailboxClient:
    """The client's side after the handshake. The socket belongs to the mailbox from then on.

    request_bytes: maximum size of a request. names: of the memory for rows, for the server. Raises
    ConnectionLost or OSError.
    """
    size = HEAD + -(-request_bytes // PAGE) * PAGE
    descriptor = os.memfd_create("moesaic-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        mailbox = MailboxClient(sock, descriptor)
        try:
            deadline.apply(sock)
            socket.send_fds(sock, [_OK], [descriptor])
            sock.sendall(len(names).to_bytes(4, "little") + names)
            read_exactly(sock, len(_OK), deadline)
        except BaseException:
            mailbox.close()
            raise
    finally:
        os.close(descriptor)
    sock.setblocking(False)
    return mailbox


def accept_mailbox(sock: socket.socket, deadline: Deadline) -> MailboxServer:
    """The server's side after the handshake, up to `confirm`. Raises ConnectionLost or OSError."""
    deadline.apply(sock)
    data, descriptors, _, _ = socket.recv_fds(sock, len(_OK), 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if data != _OK or len(descriptors) != 1:
            raise ConnectionLost("the client sent no memory")
        size = os.fstat(descriptors[0]).st_size
        if size <= HEAD or size % PAGE or fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ConnectionLost("the client's memory was refused: its size may change")
        length = int.from_bytes(read_exactly(sock, 4, deadline), "little")
        if length > MOST_NAME_BYTES:
            raise ConnectionLost("the client's names of memory are too long")
        return MailboxServer(sock, descriptors[0], read_exactly(sock, length, deadline))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def confirm(sock: socket.socket, deadline: Deadline) -> None:
    """Tell the client that its memory is open here."""
    deadline.apply(sock)
    sock.sendall(_OK)
    sock.setblocking(False)


def connect_mailbox(
    address: str, secret: bytes, request_bytes: int, names: bytes, timeout: float = HANDSHAKE_SECONDS
) -> MailboxClient:
    """A mailbox at the Listener at `address`, a Unix address. request_bytes, names: see `make_mailbox`.

    Raises as `listening.connect` does.
    """
    if not addresses.parse(address).path:
        raise ConfigError.field("address", address, "unix: for a mailbox")

    def make_end(server: ProvenPeer) -> MailboxClient:
        return make_mailbox(server.sock, request_bytes, names, server.deadline)

    return dial(address, secret, Terms(KIND, max(MIN_HEAP, request_bytes)), make_end, timeout)


def mailbox_kind(make_answerer: Callable[[MailboxServer], Answerer]) -> dict[str, Accept]:
    """What a Listener needs to accept mailboxes.

    make_answerer: opens the memory that a client names. May raise MoesaicError, which refuses the client.
    """

    def accept(client: ProvenPeer) -> Answerer:
        if client.sock.family != socket.AF_UNIX:
            raise ConnectionLost("a client asked for a mailbox, which is not possible here")
        answerer = make_answerer(accept_mailbox(client.sock, client.deadline))
        try:
            confirm(client.sock, client.deadline)
        except OSError:
            answerer.close()
            raise
        return answerer

    return {KIND: accept}
