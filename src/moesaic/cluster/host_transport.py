"""Chooses the transport between attention workers and expert servers."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from moesaic.config import HostTransport, Transport, ucx_tls
from moesaic.core.errors import ConfigError
from moesaic.transport.nixl_link import check_nixl

LOG = logging.getLogger(__name__)
COMPILED = "moesaic.transport._shm"
"""The compiled module. It is missing if moesaic was installed without a compiler, or not on Linux."""


def host_transport(asked: Transport) -> HostTransport:
    """Returns the transport that `--transport` means in this installation.

    Raises ConfigError for shm if the compiled module is missing, and for nixl if NIXL cannot be used.

    >>> host_transport("socket")
    'socket'
    """
    if asked == "socket":
        return "socket"
    if asked == "nixl":
        check_nixl(ucx_tls())
        LOG.warning("--transport nixl: rows, answers and KV between hosts are not encrypted")
        return "nixl"
    if find_spec(COMPILED) is not None:
        return "shm"
    if asked == "shm":
        raise ConfigError.field(
            "--transport", "shm", f"auto, socket (the compiled module {COMPILED} is missing)"
        )
    return "socket"
