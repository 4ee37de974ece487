"""What counts as one host, and its address for others."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

from moesaic.transport.address import Address

ALL_ADDRESSES = ("0.0.0.0", "::")
"""Hosts that mean every address of this host."""
_PROBE_TARGETS = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
"""Addresses reserved for documentation (RFC 5737, RFC 3849). Nothing is sent to them."""


@cache
def this_host() -> str:
    """An id of this host, equal for two processes if they reach each other's abstract Unix sockets.

    It consists of the boot id and the network namespace. So a container with a network of its own is a host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/net').stat().st_ino}"


def find_advertised_address(address: Address) -> Address:
    """The address at which other hosts reach a socket that is bound to `address`.

    A socket that is bound to every address is reached at the one that this host uses towards others.
    """
    if address.host not in ALL_ADDRESSES:
        return address
    family, target = _PROBE_TARGETS[address.host]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:  # no route: this host has no network
            return address._replace(host="127.0.0.1" if family == socket.AF_INET else "::1")
        return address._replace(host=probe.getsockname()[0])
