"""Connects and listens: makes a Caller or an Answerer from an address and a secret.

Question: Which transport does an address stand for, and where is a new one connected?
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.gpu.exchange.lifeline import Lifeline
from moesaic.gpu.exchange.mailbox import MailboxClient, MailboxServer, accept_mailbox, confirm, make_mailbox
from moesaic.gpu.ipc.device_calls import DeviceAnswerer
from moesaic.gpu.ipc.device_heap import SharedMemory
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import (
    Deadline,
    Terms,
    check_secret,
    check_terms,
    prove_as_client,
    prove_as_server,
    read_exactly,
)
from moesaic.transport.calls import HEAP_BYTES, MAX_HEAP, MIN_HEAP, Answerer, Caller
from moesaic.transport.host import advertised, this_host
from moesaic.transport.host_watch import watch
from moesaic.transport.nixl_link import check_installed
from moesaic.transport.one_sided import OneSidedAnswerer, OneSidedCaller, meet
from moesaic.transport.sealed_socket import Wire, wire
from moesaic.transport.sockets import StreamAnswerer, StreamCaller
from moesaic.transport.words import Word, hear, say

try:
    from moesaic.transport import shm
    from moesaic.transport.shm import ShmAnswerer
except ImportError:  # installed without a compiler, or not on Linux
    shm = None  # type: ignore[assignment]

HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 256
"""Maximum number of handshakes at the same time."""
_OK = b"+"
Mailboxes = Callable[[MailboxServer], Answerer]
"""Opens the memory that a client names. May raise MoesaicError, which refuses the client."""
Lifelines = Callable[[Word], tuple[Word, Callable[[Lifeline], Answerer]]]
"""Takes what a client said of itself. Returns what the server says, and what makes its end. May raise
MoesaicError, which refuses the client."""
SHARED = ("shm", "cuda_ipc")
"""Kinds of connections that share memory of the host."""


def connect(
    address: str,
    secret: bytes,
    kind: str = "stream",
    heap_bytes: int = HEAP_BYTES,
    timeout: float = HANDSHAKE_SECONDS,
) -> Caller:
    """Connect to the Listener at `address`.

    kind: "shm" shares memory and needs a Unix address, "stream" copies through the socket. Over TCP that is
    encrypted. "nixl" writes into the other's memory, which is not encrypted. "cuda_ipc" is as "shm", for a
    `device_calls.DeviceCaller`. The Listener has to allow these two.
    heap_bytes: maximum bytes of all open calls of this connection.
    timeout: seconds for connecting and the handshake together.

    Raises ConfigError for settings that cannot work. Raises ConnectionLost if the server is not there, is too
    slow, or refuses.
    """
    where, terms = addresses.parse(address), Terms(kind, heap_bytes)
    check_secret(secret)
    check_terms(terms)
    if kind in SHARED and not where.path:
        raise ConfigError.field("kind", kind, f"stream for a tcp: address; {kind} needs unix:")
    if kind in SHARED and shm is None:
        raise ConfigError.field("kind", kind, "stream: the compiled module moesaic.transport._shm is missing")
    if kind == "nixl":
        check_installed()
    deadline, sock = Deadline(timeout), _dialed(where, timeout)
    try:
        keys = prove_as_client(sock, secret, terms, deadline)
        if kind in SHARED:
            return _share(sock, heap_bytes, deadline)
        watch(sock)
        if kind == "nixl":
            deadline.apply(sock)
            sealed = wire(sock, keys)
            return OneSidedCaller(sealed, meet(sealed, heap_bytes, True, deadline))
        return StreamCaller(wire(sock, keys), heap_bytes)
    except (OSError, ConnectionLost) as error:
        sock.close()
        raise ConnectionLost(f"no connection to {address}: {error}") from None


def connect_mailbox(
    address: str, secret: bytes, request_bytes: int, names: bytes, timeout: float = HANDSHAKE_SECONDS
) -> MailboxClient:
    """A mailbox at the Listener at `address`, a Unix address. request_bytes, names: see `make_mailbox`.

    Raises as `connect`.
    """
    where = addresses.parse(address)
    if not where.path:
        raise ConfigError.field("address", address, "unix: for a mailbox")
    deadline, sock = Deadline(timeout), _dialed(where, timeout)
    try:
        prove_as_client(sock, secret, Terms("mailbox", max(MIN_HEAP, request_bytes)), deadline)
        return make_mailbox(sock, request_bytes, names, deadline)
    except (OSError, ConnectionLost) as error:
        sock.close()
        raise ConnectionLost(f"no connection to {address}: {error}") from None


def connect_lifeline(address: str, secret: bytes, who: Word, timeout: float = HANDSHAKE_SECONDS) -> Lifeline:
    """A lifeline to the Listener at `address`. who: what this client says of itself.

    Raises as `connect`, also where the server refuses who this is.
    """
    where = addresses.parse(address)
    check_secret(secret)
    deadline, sock = Deadline(timeout), _dialed(where, timeout)
    try:
        sealed = wire(sock, prove_as_client(sock, secret, Terms("nvshmem", MIN_HEAP), deadline))
        watch(sock)
        deadline.apply(sock)
        say(sealed, **who)
        return Lifeline(sock, sealed, hear(sealed))
    except (OSError, ConnectionLost) as error:
        sock.close()
        raise ConnectionLost(f"no connection to {address}: {error}") from None


def _dialed(where: addresses.Address, timeout: float) -> socket.socket:
    """A socket to an address. Raises ConnectionLost."""
    try:
        return addresses.dial(where, timeout)
    except OSError as error:
        raise ConnectionLost(f"no connection to {where}: {error.strerror or error}") from None


def kind_of(transport: str, address: str) -> str:
    """The `kind` for `connect`. transport: shm, socket, nixl, cuda_ipc or nvshmem. The last one is for
    requests of graphs, and the others go as with shm.

    >>> kind_of("nixl", "tcp:10.0.0.2:80"), kind_of("shm", "tcp:10.0.0.2:80")
    ('nixl', 'stream')
    """
    if not address.startswith("unix:"):
        return "nixl" if transport == "nixl" else "stream"
    if transport == "cuda_ipc":
        return "cuda_ipc"
    return "stream" if transport == "socket" or shm is None else "shm"


def _share(sock: socket.socket, heap_bytes: int, deadline: Deadline) -> Caller:
    """Create the segment, send it to the server, and wait until the server has it."""
    mapping, descriptor = shm.make_segment(heap_bytes)
    try:
        caller = shm.ShmCaller(sock, mapping)  # writes the header before the server looks
        deadline.apply(sock)
        socket.send_fds(sock, [_OK], [descriptor])
        read_exactly(sock, len(_OK), deadline)
        sock.setblocking(False)
        return caller
    finally:
        os.close(descriptor)


class Listener:
    """Accepts and authenticates connections in the background. `accepted` returns those that passed.

    A peer that stalls, sends invalid data or does not know the secret is dropped with one line in the log. It
    delays no other peer. remote: a further address, tcp:HOST:PORT, for processes of other hosts.
    one_sided: accept clients that ask for "nixl". open_memory: accept those that ask for "cuda_ipc", and open
    memory of their GPUs by its name. mailboxes: accept mailboxes, and make their ends. lifelines: accept
    those that ask for "nvshmem". Raises ConfigError if it cannot listen at an address.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        max_heap_bytes: int = MAX_HEAP,
        remote: str | None = None,
        one_sided: bool = False,
        open_memory: Callable[[bytes], SharedMemory] | None = None,
        mailboxes: Mailboxes | None = None,
        lifelines: Lifelines | None = None,
    ) -> None:
        check_secret(secret)
        self._one_sided, self._open_memory = one_sided, open_memory
        self._mailboxes, self._lifelines = mailboxes, lifelines
        self._secret, self._seconds, self._max_heap = secret, handshake_seconds, max_heap_bytes
        listening, where = addresses.bind(addresses.parse(address))
        with contextlib.ExitStack() as undo:
            undo.callback(listening.close)
            further = [] if remote is None else [addresses.bind(addresses.parse(remote))]
            undo.pop_all()
        self.address = str(where)
        """The first address, with the actual port."""
        seen = "".join(str(advertised(one)) for _, one in further)
        self.endpoint = Endpoint(self.address, seen, this_host())
        """Where processes of this host and of others connect."""
        self._file = where.file
        self._lock = threading.Lock()
        self._done: deque[Answerer] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._acceptors = [
            Acceptor(sock, str(one), self._handshake, self._add, MAX_PENDING)
            for sock, one in ((listening, where), *further)
        ]

    def fileno(self) -> int:
        """A descriptor that is readable while `accepted` has connections."""
        return self._wakeup

    def accepted(self) -> list[Answerer]:
        """The connections that passed since the last call. Never blocks."""
        with self._lock:
            done = list(self._done)
            self._done.clear()
            if done:
                os.eventfd_read(self._wakeup)
        return done

    def close(self) -> None:
        """Stop listening and drop the handshakes.

        Connections that `accepted` returned stay open. A repeated call does nothing.
        """
        if self._acceptors[0].closed:
            return
        for acceptor in self._acceptors:
            acceptor.close()
        for answerer in self.accepted():
            answerer.close()
        os.close(self._wakeup)
        if self._file:
            Path(self._file).unlink(missing_ok=True)

    def _add(self, answerer: Answerer) -> None:
        with self._lock:
            self._done.append(answerer)
            if len(self._done) == 1:
                os.eventfd_write(self._wakeup, 1)

    def _handshake(self, sock: socket.socket) -> Answerer:
        if addresses.foreign(sock):
            raise ConnectionLost("a process of another user")
        deadline = Deadline(self._seconds)
        terms, keys = prove_as_server(sock, self._secret, deadline)
        if terms.heap_bytes > self._max_heap:
            raise ConfigError.field("heap_bytes", terms.heap_bytes, f"at most {self._max_heap}")
        if terms.kind == "shm":
            return self._mapped(sock, terms, deadline)
        if terms.kind == "cuda_ipc":
            if self._open_memory is None:
                raise ConnectionLost("a client asked for memory of GPUs, which is not allowed here")
            return DeviceAnswerer(self._mapped(sock, terms, deadline), self._open_memory)
        if terms.kind == "mailbox":
            return self._mailbox(sock, deadline)
        if terms.kind == "nixl" and not self._one_sided:
            raise ConnectionLost("a client asked for one-sided writes, which are not allowed here")
        watch(sock)
        if terms.kind == "nvshmem":
            return self._lifeline(sock, wire(sock, keys), deadline)
        if terms.kind == "nixl":
            deadline.apply(sock)
            sealed = wire(sock, keys)
            return OneSidedAnswerer(sealed, meet(sealed, terms.heap_bytes, False, deadline))
        return StreamAnswerer(wire(sock, keys), terms.heap_bytes)

    def _mailbox(self, sock: socket.socket, deadline: Deadline) -> Answerer:
        if self._mailboxes is None or sock.family != socket.AF_UNIX:
            raise ConnectionLost("a client asked for a mailbox, which is not possible here")
        answerer = self._mailboxes(accept_mailbox(sock, deadline))
        try:
            confirm(sock, deadline)
        except OSError:
            answerer.close()
            raise
        return answerer

    def _lifeline(self, sock: socket.socket, sealed: Wire, deadline: Deadline) -> Answerer:
        if self._lifelines is None:
            raise ConnectionLost("a client asked for NVSHMEM, which is not possible here")
        deadline.apply(sock)
        own, made = self._lifelines(client := hear(sealed))
        say(sealed, **own)
        return made(Lifeline(sock, sealed, client))

    def _mapped(self, sock: socket.socket, terms: Terms, deadline: Deadline) -> ShmAnswerer:
        """An Answerer on the memory that the client sends."""
        if shm is None:
            raise ConnectionLost("a client asked for shared memory, and moesaic.transport._shm is missing")
        deadline.apply(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, len(_OK), 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if data != _OK or len(descriptors) != 1:
                raise ConnectionLost("the client sent no memory")
            answerer = shm.ShmAnswerer(sock, descriptors[0], terms.heap_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        deadline.apply(sock)
        sock.sendall(_OK)
        sock.setblocking(False)
        return answerer
