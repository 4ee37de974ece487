"""The handshake of a connection: both sides prove that they know the secret, without sending it.

    client: MAGIC, 32 random bytes a             server: MAGIC, 32 random bytes b
    client: terms, HMAC(secret, "client" a b terms)
                                                 server: HMAC(secret, "server" a b terms)

The HMAC is HMAC-SHA256, compared in constant time. The two labels differ, so a proof cannot be sent back to
its sender. The numbers a and b are new each time, so a proof cannot be used twice. Every message has a fixed
length, so nothing is parsed before the peer is known. What follows the handshake is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport.calls import MAX_HEAP, MIN_HEAP

MAGIC = b"moesaic1"
NONCE = 32
PROOF = 32
_TERMS = struct.Struct("<8sQ")
KINDS = ("shm", "stream")


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


class Refused(ConnectionLost):
    """The other end does not accept this secret or this server. A new attempt would not change that."""


class Deadline:
    """The time by which a whole handshake must be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def apply(self, sock: socket.socket) -> None:
        """Set the timeout of `sock` to the remaining time. Raises TimeoutError if none remains."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)


def prove_as_client(sock: socket.socket, secret: bytes, terms: Terms, deadline: Deadline) -> None:
    """Do the client's side. Raises Refused when the secrets differ, otherwise ConnectionLost or OSError."""
    mine = secrets.token_bytes(NONCE)
    _send(sock, MAGIC + mine, deadline)
    nonces = mine + _nonce(sock, deadline)
    packed = _TERMS.pack(terms.kind.encode(), terms.heap_bytes)
    _send(sock, packed + _proof(secret, b"client", nonces, packed), deadline)
    try:
        proof = read_exactly(sock, PROOF, deadline)
    except ConnectionLost as lost:
        raise Refused("the other end closed the connection during the handshake: another secret?") from lost
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces, packed)):
        raise Refused("the server does not know the secret")


def prove_as_server(sock: socket.socket, secret: bytes, deadline: Deadline) -> Terms:
    """Do the server's side. Raises ConnectionLost if the client does not know the secret, or OSError."""
    theirs = _nonce(sock, deadline)
    mine = secrets.token_bytes(NONCE)
    _send(sock, MAGIC + mine, deadline)
    packed = read_exactly(sock, _TERMS.size, deadline)
    proof, nonces = read_exactly(sock, PROOF, deadline), theirs + mine
    if not hmac.compare_digest(proof, _proof(secret, b"client", nonces, packed)):
        raise ConnectionLost("the client does not know the secret")
    kind, heap_bytes = _TERMS.unpack(packed)
    terms = Terms(kind.rstrip(b"\0").decode("ascii", "replace"), heap_bytes)
    check_terms(terms)
    _send(sock, _proof(secret, b"server", nonces, packed), deadline)
    return terms


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


def _nonce(sock: socket.socket, deadline: Deadline) -> bytes:
    if read_exactly(sock, len(MAGIC), deadline) != MAGIC:
        raise ConnectionLost("the other end is not moesaic, or another version of it")
    return read_exactly(sock, NONCE, deadline)


def _proof(secret: bytes, label: bytes, nonces: bytes, terms: bytes) -> bytes:
    return hmac.digest(secret, label + nonces + terms, "sha256")
