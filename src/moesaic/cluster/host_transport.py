"""How attention workers reach the expert servers of their own host."""

from __future__ import annotations

from importlib.util import find_spec

from moesaic.config import HostTransport, Transport
from moesaic.core.errors import ConfigError

COMPILED = "moesaic.transport._shm"
"""Missing where moesaic was installed without a compiler, or not on Linux."""


def host_transport(asked: Transport) -> HostTransport:
    """What `--transport` comes to with this installation. Raises ConfigError for shm that it does not have.

    >>> host_transport("socket")
    'socket'
    """
    if asked == "socket":
        return "socket"
    if find_spec(COMPILED) is not None:
        return "shm"
    if asked == "shm":
        raise ConfigError.field(
            "--transport", "shm", f"auto, socket (the compiled module {COMPILED} is missing)"
        )
    return "socket"
