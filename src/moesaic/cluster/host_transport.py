"""Chooses the transport between attention workers and the expert servers of their own host."""

from __future__ import annotations

from importlib.util import find_spec

from moesaic.config import HostTransport, Transport
from moesaic.core.errors import ConfigError

COMPILED = "moesaic.transport._shm"
"""The compiled module. It is missing if moesaic was installed without a compiler, or not on Linux."""


def host_transport(asked: Transport) -> HostTransport:
    """Returns the transport that `--transport` means in this installation.

    Raises ConfigError for shm if the compiled module is missing.

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
