"""Opens the server's socket. It imports nothing slow, so that a used port is reported at once."""

from __future__ import annotations

import errno
import socket

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
