"""Connects and listens: makes a Caller or an Answerer from an address and a secret.

Question: How is a transport added, and which one does an address stand for?
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import (
    SHARED_MEMORY_KINDS,
    Deadline,
    Terms,
    check_secret,
    check_terms,
    prove_as_client,
    prove_as_server,
    read_exactly,
)
from moesaic.transport.calls import HEAP_BYTES, MAX_HEAP, Answerer, Caller
from moesaic.transport.host import find_advertised_address, this_host
from moesaic.transport.host_watch import watch
from moesaic.transport.nixl_link import check_installed
from moesaic.transport.one_sided_calls import OneSidedAnswerer, OneSidedCaller, meet
from moesaic.transport.sealed_socket import wire
from moesaic.transport.sealing import Keys
from moesaic.transport.sockets import StreamAnswerer, StreamCaller

try:
    from moesaic.transport import shm
    from moesaic.transport.shm import ShmAnswerer
except ImportError:  # installed without a compiler, or not on Linux
    shm = None  # type: ignore[assignment]

HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 256
"""Maximum number of handshakes at the same time."""
_OK = b"+"


@dataclass(frozen=True)
class ProvenPeer:
    """The other end of a connection, which has proved that it knows the secret."""

    sock: socket.socket
    terms: Terms
    """What the client asks for."""
    keys: Keys
    """The keys of the own end."""
    deadline: Deadline
    """The time by which the connection must be made."""


Accept = Callable[[ProvenPeer], Answerer]
"""Makes the server's end of a connection of one kind. May raise MoesaicError or OSError, which refuses the
client."""


class Closable(Protocol):
    """A client's end of a connection."""

    def close(self) -> None: ...


ClientEnd = TypeVar("ClientEnd", bound=Closable)


def connect(
    address: str,
    secret: bytes,
    kind: str = "stream",
    heap_bytes: int = HEAP_BYTES,
    timeout: float = HANDSHAKE_SECONDS,
) -> Caller:
    """Connect to the Listener at `address`.

    kind: "shm" shares memory and needs a Unix address, "stream" copies through the socket. Over TCP that is
    encrypted. "nixl" writes into the other's memory, which is not encrypted. Each other kind of
    `SHARED_MEMORY_KINDS` is as "shm", for a caller that wraps it. The Listener has to allow all but the first
    two. heap_bytes: maximum bytes of all open calls of this connection. timeout: seconds for connecting and
    the handshake together.

    Raises ConfigError for settings that cannot work. Raises ConnectionLost if the server is not there, is too
    slow, or refuses.
    """
    parsed_address, terms = addresses.parse(address), Terms(kind, heap_bytes)
    check_secret(secret)
    check_terms(terms)
    if kind in SHARED_MEMORY_KINDS and not parsed_address.path:
        raise ConfigError.field("kind", kind, f"stream for a tcp: address; {kind} needs unix:")
    if kind in SHARED_MEMORY_KINDS and shm is None:
        raise ConfigError.field("kind", kind, "stream: the compiled module moesaic.transport._shm is missing")
    if kind == "nixl":
        check_installed()
    return dial(address, secret, terms, _CALLERS[kind], timeout)


def dial(
    address: str,
    secret: bytes,
    terms: Terms,
    make_end: Callable[[ProvenPeer], ClientEnd],
    timeout: float = HANDSHAKE_SECONDS,
) -> ClientEnd:
    """Connect to the Listener at `address`, and make the client's end of a connection of any kind.

    Raises ConnectionLost as `connect` does, and what `make_end` raises.
    """
    parsed_address = addresses.parse(address)
    check_secret(secret)
    deadline = Deadline(timeout)
    try:
        sock = addresses.dial(parsed_address, timeout)
    except OSError as error:
        raise ConnectionLost(f"no connection to {parsed_address}: {error.strerror or error}") from None
    try:
        return make_end(ProvenPeer(sock, terms, prove_as_client(sock, secret, terms, deadline), deadline))
    except (OSError, ConnectionLost) as error:
        sock.close()
        raise ConnectionLost(f"no connection to {address}: {error}") from None


def kind_of(transport: str, address: str) -> str:
    """The `kind` for `connect`. transport: see `HostTransport`.

    A transport for the requests of graphs only sends all others as shm does.

    >>> kind_of("nixl", "tcp:10.0.0.2:80"), kind_of("shm", "tcp:10.0.0.2:80")
    ('nixl', 'stream')
    """
    if not address.startswith("unix:"):
        return "nixl" if transport == "nixl" else "stream"
    if transport in SHARED_MEMORY_KINDS and transport != "shm":
        return transport
    return "stream" if transport == "socket" or shm is None else "shm"


def _share_memory(server: ProvenPeer) -> Caller:
    """Create the segment, send it to the server, and wait until the server has it."""
    sock, deadline = server.sock, server.deadline
    mapping, descriptor = shm.make_segment(server.terms.heap_bytes)
    try:
        caller = shm.ShmCaller(sock, mapping)  # writes the header before the server looks
        deadline.apply(sock)
        socket.send_fds(sock, [_OK], [descriptor])
        read_exactly(sock, len(_OK), deadline)
        sock.setblocking(False)
        return caller
    finally:
        os.close(descriptor)


def _call_by_stream(server: ProvenPeer) -> Caller:
    watch(server.sock)
    return StreamCaller(wire(server.sock, server.keys), server.terms.heap_bytes)


def _call_one_sided(server: ProvenPeer) -> Caller:
    watch(server.sock)
    server.deadline.apply(server.sock)
    sealed_wire = wire(server.sock, server.keys)
    return OneSidedCaller(sealed_wire, meet(sealed_wire, server.terms.heap_bytes, True, server.deadline))


_CALLERS: dict[str, Callable[[ProvenPeer], Caller]] = {
    **dict.fromkeys(SHARED_MEMORY_KINDS, _share_memory),
    "stream": _call_by_stream,
    "nixl": _call_one_sided,
}
"""Kind -> what makes the client's end of a connection for calls."""


def accept_shared_memory(client: ProvenPeer) -> ShmAnswerer:
    """An Answerer on the memory that the client sends."""
    if shm is None:
        raise ConnectionLost("a client asked for shared memory, and moesaic.transport._shm is missing")
    sock = client.sock
    client.deadline.apply(sock)
    data, descriptors, _, _ = socket.recv_fds(sock, len(_OK), 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if data != _OK or len(descriptors) != 1:
            raise ConnectionLost("the client sent no memory")
        answerer = shm.ShmAnswerer(sock, descriptors[0], client.terms.heap_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    client.deadline.apply(sock)
    sock.sendall(_OK)
    sock.setblocking(False)
    return answerer


def _answer_by_stream(client: ProvenPeer) -> Answerer:
    watch(client.sock)
    return StreamAnswerer(wire(client.sock, client.keys), client.terms.heap_bytes)


def _answer_one_sided(client: ProvenPeer) -> Answerer:
    watch(client.sock)
    client.deadline.apply(client.sock)
    sealed_wire = wire(client.sock, client.keys)
    return OneSidedAnswerer(sealed_wire, meet(sealed_wire, client.terms.heap_bytes, False, client.deadline))


_DEFAULT_KINDS: Mapping[str, Accept] = {"shm": accept_shared_memory, "stream": _answer_by_stream}
"""The kinds of connections that every Listener accepts."""
NIXL_KIND: Mapping[str, Accept] = {"nixl": _answer_one_sided}
"""The kind whose client writes into memory of the server, which is not encrypted."""


class Listener:
    """Accepts and authenticates connections in the background. `take_connections` returns those that passed.

    A peer that stalls, sends invalid data or does not know the secret is dropped with one line in the log. It
    delays no other peer. remote: a further address, tcp:HOST:PORT, for processes of other hosts.
    kinds: the kinds of connections that it accepts beside "shm" and "stream", such as NIXL_KIND.

    Raises ConfigError if it cannot listen at an address.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        max_heap_bytes: int = MAX_HEAP,
        remote: str | None = None,
        kinds: Mapping[str, Accept] | None = None,
    ) -> None:
        check_secret(secret)
        self._kinds = {**_DEFAULT_KINDS, **(kinds or {})}
        self._secret, self._seconds, self._max_heap = secret, handshake_seconds, max_heap_bytes
        listening, parsed_address = addresses.bind(addresses.parse(address))
        with contextlib.ExitStack() as undo:
            undo.callback(listening.close)
            further_sockets = [] if remote is None else [addresses.bind(addresses.parse(remote))]
            undo.pop_all()
        self.address = str(parsed_address)
        """The first address, with the actual port."""
        remote_addresses = "".join(
            str(find_advertised_address(bound_address)) for _, bound_address in further_sockets
        )
        self.endpoint = Endpoint(self.address, remote_addresses, this_host())
        """Where processes of this host and of others connect."""
        self._file = parsed_address.file
        self._lock = threading.Lock()
        self._answerers: deque[Answerer] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._acceptors = [
            Acceptor(sock, str(bound_address), self._handshake, self._add, MAX_PENDING)
            for sock, bound_address in ((listening, parsed_address), *further_sockets)
        ]

    def fileno(self) -> int:
        """A descriptor that is readable while `take_connections` has connections."""
        return self._wakeup

    def take_connections(self) -> list[Answerer]:
        """The connections that passed since the last call. Never blocks."""
        with self._lock:
            answerers = list(self._answerers)
            self._answerers.clear()
            if answerers:
                os.eventfd_read(self._wakeup)
        return answerers

    def close(self) -> None:
        """Stop listening and drop the handshakes.

        Connections that `take_connections` returned stay open. A repeated call does nothing.
        """
        if self._acceptors[0].is_closed:
            return
        for acceptor in self._acceptors:
            acceptor.close()
        for answerer in self.take_connections():
            answerer.close()
        os.close(self._wakeup)
        if self._file:
            Path(self._file).unlink(missing_ok=True)

    def _add(self, answerer: Answerer) -> None:
        with self._lock:
            self._answerers.append(answerer)
            if len(self._answerers) == 1:
                os.eventfd_write(self._wakeup, 1)

    def _handshake(self, sock: socket.socket) -> Answerer:
        if addresses.is_foreign(sock):
            raise ConnectionLost("a process of another user")
        deadline = Deadline(self._seconds)
        terms, keys = prove_as_server(sock, self._secret, deadline)
        if terms.heap_bytes > self._max_heap:
            raise ConfigError.field("heap_bytes", terms.heap_bytes, f"at most {self._max_heap}")
        if terms.kind not in self._kinds:
            raise ConnectionLost(f"a client asked for a connection of kind {terms.kind}, not allowed here")
        return self._kinds[terms.kind](ProvenPeer(sock, terms, keys, deadline))
