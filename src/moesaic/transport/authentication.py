"""The handshake of a connection: both sides prove that they know the secret, without sending it.

    client: GREETING, 32 random bytes a          server: GREETING, 32 random bytes b
    client: terms, HMAC(secret, "client" GREETING a b terms)
                                                 server: HMAC(secret, "server" GREETING a b terms)

The HMAC is HMAC-SHA256, compared in constant time. The two labels differ, so a proof cannot be sent back to
its sender. The numbers a and b are new each time, so a proof cannot be used twice. Every message has a fixed
length, so nothing is parsed before the peer is known. The greeting has the protocol and the version of
moesaic, and both ends go on only if they are the same.

A server that does not accept the proof answers with REFUSAL instead of its own proof. So a client can tell a
refusal from a connection that broke. After the handshake both ends have keys that depend on a, b and the
terms. Everything that follows on a TCP connection is sealed with them (sealing.py).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.version import __version__
from moesaic.transport.calls import MAX_HEAP, MIN_HEAP
from moesaic.transport.sealing import Keys, derive_client_keys

MAGIC = b"moesaic5"
"""Name and number of the protocol. Ends with different ones refuse each other."""
VERSION_BYTES = 16
GREETING = MAGIC + __version__.encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")
"""The protocol and the version of moesaic, with zeros behind it."""
_NAME = b"moesaic"
NONCE = 32
PROOF = 32
REFUSAL = bytes(PROOF)
_TERMS = struct.Struct("<8sQ")
KINDS = ("shm", "stream", "nixl", "cuda_ipc", "mailbox", "nvshmem")
SHARED_MEMORY_KINDS = ("shm", "cuda_ipc")
"""The kinds of connections for calls whose two ends share memory of the host."""


class Terms(NamedTuple):
    """What the client asks for: one of KINDS, and the maximum bytes of its open calls."""

    kind: str
    heap_bytes: int


def check_secret(secret: bytes) -> None:
    """Raise ConfigError if the secret is too short."""
    if len(secret) < 16:
        raise ConfigError.field("secret", f"{len(secret)} bytes", "at least 16 bytes")


def check_terms(terms: Terms) -> None:
    """Raise ConfigError if the terms are not possible."""
    if terms.kind not in KINDS:
        raise ConfigError.field("kind", terms.kind, " or ".join(KINDS))
    if not MIN_HEAP <= terms.heap_bytes <= MAX_HEAP:
        raise ConfigError.field("heap_bytes", terms.heap_bytes, f"{MIN_HEAP} to {MAX_HEAP}")


class PeerRefused(ConnectionLost):
    """The other end does not accept this secret or this server. A new attempt would not change that."""


class RefusedByCluster(PeerRefused):
    """The cluster said, after the handshake, that it does not accept this server."""


class Deadline:
    """The time by which a whole handshake must be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """The remaining seconds. Raises TimeoutError if none remain."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def apply(self, sock: socket.socket) -> None:
        """Set the timeout of `sock` to the remaining time. Raises TimeoutError if none remains."""
        sock.settimeout(self.left())


def prove_as_client(sock: socket.socket, secret: bytes, terms: Terms, deadline: Deadline) -> Keys:
    """Do the client's side. Returns the keys of its end.

    Raises Refused when the secrets or the versions differ, otherwise ConnectionLost or OSError.
    """
    own_nonce = secrets.token_bytes(NONCE)
    _send(sock, GREETING + own_nonce, deadline)
    greeting, peer_nonce = _read_greeting(sock, deadline)
    _check_version(greeting)
    nonces = own_nonce + peer_nonce
    packed_terms = _TERMS.pack(terms.kind.encode(), terms.heap_bytes)
    _send(sock, packed_terms + _proof(secret, b"client", nonces, packed_terms), deadline)
    proof = read_exactly(sock, PROOF, deadline)
    if proof == REFUSAL:
        raise PeerRefused("the server does not accept this secret: it has another secret")
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces, packed_terms)):
        raise PeerRefused("the server does not know the secret")
    return derive_client_keys(secret, nonces, packed_terms)


def prove_as_server(sock: socket.socket, secret: bytes, deadline: Deadline) -> tuple[Terms, Keys]:
    """Do the server's side. Returns what the client asks for, and the keys of the server's end.

    Raises ConnectionLost if the client does not know the secret or has another version, or OSError.
    """
    greeting, peer_nonce = _read_greeting(sock, deadline)
    own_nonce = secrets.token_bytes(NONCE)
    _send(sock, GREETING + own_nonce, deadline)  # also to another version, which then knows why it is refused
    _check_version(greeting)
    packed_terms = read_exactly(sock, _TERMS.size, deadline)
    proof, nonces = read_exactly(sock, PROOF, deadline), peer_nonce + own_nonce
    if not hmac.compare_digest(proof, _proof(secret, b"client", nonces, packed_terms)):
        _send(sock, REFUSAL, deadline)
        raise ConnectionLost("the client does not know the secret")
    kind, heap_bytes = _TERMS.unpack(packed_terms)
    terms = Terms(kind.rstrip(b"\0").decode("ascii", "replace"), heap_bytes)
    check_terms(terms)
    _send(sock, _proof(secret, b"server", nonces, packed_terms), deadline)
    return terms, derive_client_keys(secret, nonces, packed_terms).swap()


def read_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Read `count` bytes. Raises ConnectionLost at the end of the stream and TimeoutError at the deadline."""
    got = b""
    while len(got) < count:
        deadline.apply(sock)
        part = sock.recv(count - len(got))
        if not part:
            raise ConnectionLost("the other end closed the connection during the handshake")
        got += part
    return got


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    deadline.apply(sock)
    sock.sendall(data)


def _read_greeting(sock: socket.socket, deadline: Deadline) -> tuple[bytes, bytes]:
    """The greeting of the other end, and its random bytes. Of another protocol the greeting is its MAGIC.

    Raises ConnectionLost if that is not moesaic.
    """
    magic = read_exactly(sock, len(MAGIC), deadline)
    if not magic.startswith(_NAME):
        raise ConnectionLost("the other end is not moesaic")
    version = read_exactly(sock, VERSION_BYTES, deadline) if magic == MAGIC else b""
    return magic + version, read_exactly(sock, NONCE, deadline)


def _check_version(greeting: bytes) -> None:
    """Raises PeerRefused, with both versions, unless the other end has that of this one."""
    if greeting == GREETING:
        return
    text = greeting.decode("latin-1").rstrip("\0")
    if greeting.startswith(MAGIC):
        difference = f"is moesaic {text[len(MAGIC) :]!a}, this end {__version__!r}"
    else:
        difference = f"speaks protocol {text!a}, this end {MAGIC.decode()!r} of moesaic {__version__!r}"
    raise PeerRefused(f"the other end {difference}: both need the same version of moesaic")


def _proof(secret: bytes, label: bytes, nonces: bytes, terms: bytes) -> bytes:
    return hmac.digest(secret, label + GREETING + nonces + terms, "sha256")
