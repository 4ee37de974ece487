"""Opens the server's socket. It imports nothing slow, so that a used port is reported at once."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from moesaic.core.errors import ConfigError

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises ConfigError if the address cannot be used.

    Call it before anything slow, so that a used port is reported before a model is loaded.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host: got {host!r}; cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted server can bind while old connections of its port are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        # An address that no interface has is the fault of --host. Any other failure is about the port.
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def listen(host: str, port: int, unix_socket: str | None = None) -> Iterator[socket.socket]:
    """A listening socket, which is closed at the end. unix_socket: a path in place of host and port.

    Raises ConfigError if it cannot be used.
    """
    if unix_socket is None:
        with contextlib.closing(bind(host, port)) as listener:
            yield listener
        return
    path = Path(unix_socket)
    with contextlib.closing(_bind_unix(path)) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def name_address(listener: socket.socket) -> tuple[str, str]:
    """The host of a listening socket, and its URL. A Unix socket is a loopback address to everybody else."""
    address = listener.getsockname()
    if isinstance(address, str):
        return "127.0.0.1", f"unix:{address}"
    host, port = address[:2]
    return host, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_unix(path: Path) -> socket.socket:
    """A listening socket at `path`. A socket at which nobody listens any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_used(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen at {path}: {error.strerror or error}") from error
    return listener


def _is_used(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0
