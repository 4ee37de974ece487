"""The address of a server: "unix:/path", "unix:@name" or "tcp:host:port".

A @name is not a file (Linux's abstract sockets). Nothing remains of it, however its process ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.core.errors import ConfigError

_PATH_BYTES = 107
"""Maximum bytes of the path of a Unix socket."""
_ALLOWED_FORMS = (
    f"unix:/path or unix:@name of at most {_PATH_BYTES} bytes, "
    "or tcp:host:port with an IPv6 host in [brackets]"
)
_NAME_PREFIX = "@"

IDLE_SECONDS, PROBE_SECONDS, PROBES = 1, 1, 3
"""TCP keepalive. `host_watch` measures the answers of the other host."""
UNACKNOWLEDGED_SECONDS = 30
"""A TCP connection ends when sent bytes are not acknowledged for so many seconds."""

UNIX_BUFFER_BYTES = 1 << 20
"""Send buffer of a Unix socket. The kernel may grant less. TCP sizes its own buffers."""


class Address(NamedTuple):
    """`path` of a Unix socket, or `host` and `port`.

    A path may be a @name. A single @ means any free name, and port 0 means any free port.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def file(self) -> str | None:
        """The socket's file, which exists while a server listens. None for other addresses."""
        return self.path if self.path and not self.path.startswith(_NAME_PREFIX) else None

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Parse an address. Raises ConfigError.

    >>> parse("tcp:[::1]:8000")
    Address(path='', host='::1', port=8000)
    """
    kind, _, location = text.partition(":")
    if kind == "unix" and location and len(os.fsencode(location)) <= _PATH_BYTES:
        return Address(path=location)
    host, _, port = location.rpartition(":")
    if kind == "tcp" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise ConfigError.field("address", text, _ALLOWED_FORMS)


def bind(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket and its actual address. Raises ConfigError if it cannot listen there.

    A @name has no file permissions, so any process that knows it can connect. See `is_foreign`.
    """
    if address.path == _NAME_PREFIX:
        address = Address(path=f"{_NAME_PREFIX}moesaic-{secrets.token_hex(8)}")
    try:
        sock = _bind_unix(address) if address.path else _bind_tcp(address)
    except OSError as error:
        raise ConfigError.field(
            "address", str(address), f"one that is free ({error.strerror or error})"
        ) from None
    if not address.path:
        address = address._replace(port=sock.getsockname()[1])
    return sock, address


def dial(address: Address, timeout: float) -> socket.socket:
    """A connected socket. Raises OSError."""
    if not address.path:
        sock = socket.create_connection((address.host, address.port), timeout)
        tune(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    tune(sock)
    end = time.monotonic() + timeout
    try:
        while not _try_connect(sock, address.path):
            if time.monotonic() >= end:
                raise TimeoutError("timed out")
            time.sleep(0.01)
    except OSError:
        sock.close()
        raise
    return sock


def _try_connect(sock: socket.socket, path: str) -> bool:
    """Try to connect. Returns False while the listener's queue is full.

    A Unix socket with a timeout does not wait for that.
    """
    sock.setblocking(False)
    try:
        sock.connect(_kernel_name(path))
    except BlockingIOError:
        return False
    return True


def tune(sock: socket.socket) -> None:
    """Set socket options: small frames leave at once, large ones need few wakeups, and lost hosts are
    noticed.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000)


def is_foreign(sock: socket.socket) -> bool:
    """Whether the process at the other end of a connected Unix socket belongs to another user."""
    return sock.family == socket.AF_UNIX and _peer_process(sock)[1] != os.geteuid()


def peer_process(sock: socket.socket) -> int:
    """Id of the process at the other end of a connected Unix socket. 0: it is in a namespace of its own."""
    return _peer_process(sock)[0]


def peer(sock: socket.socket, name: Any) -> str:
    """A readable name of the process at the other end of `sock`. name: its address, as returned by `accept`.

    Example: "tcp:127.0.0.1:50123", or "process 4711" for a Unix socket, whose clients have no address.
    """
    if sock.family == socket.AF_UNIX:
        return f"process {_peer_process(sock)[0]}"
    return str(Address(host=name[0], port=name[1]))


def _peer_process(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of a Unix socket."""
    pid, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _bind_tcp(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=128)


def _kernel_name(path: str) -> str:
    return path.replace(_NAME_PREFIX, "\0", 1) if path.startswith(_NAME_PREFIX) else path


def _bind_unix(address: Address) -> socket.socket:
    """Bind a Unix socket.

    Only this user can connect to a file. A file that a dead process left is replaced.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if address.file and _left_behind(address.file):
            Path(address.file).unlink()
        sock.bind(_kernel_name(address.path))
        if address.file:
            Path(address.file).chmod(0o600)  # no client can connect before `listen`
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def _left_behind(path: str) -> bool:
    """Whether the path is a socket on which no process listens."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False
