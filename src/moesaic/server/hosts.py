"""Checks the header Host of a server without an API key.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding), and then call a server on its reader's
machine as if it were its own. The header Host still has the page's name.

Question: Who may call the API: keys, hosts, sizes and times of bodies?
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

ANY_HOST = "*"
"""The value of --allowed-hosts that allows every host."""


@dataclass(frozen=True)
class Hosts:
    """The hosts that clients may call the server by."""

    names: frozenset[str]
    """Lower-case names and addresses beside those of the loopback interface."""
    any_address: bool
    """Allow every IP address. A web page's name is none, so this is safe where the server is not local."""

    @classmethod
    def from_listener(cls, host: str, address: str, more_hosts: tuple[str, ...] = ()) -> Hosts:
        """The hosts of a server that listens on `host`, which means `address`. more_hosts: further ones."""
        # DNS names ignore case, and may end with a dot.
        names = frozenset(name.lower().removesuffix(".") for name in (host, *more_hosts))
        return cls(names, not is_loopback(address))

    def allow(self, header: str) -> bool:
        """Whether the value of the header Host is allowed. A port is ignored."""
        if ANY_HOST in self.names:
            return True
        name = _without_port(header.strip().lower()).removesuffix(".")
        if name and name in self.names:
            return True
        if name == "localhost" or name.endswith(".localhost"):
            return True
        return is_loopback(name) or (self.any_address and _is_address(name))


def is_loopback(name: str) -> bool:
    """Whether `name` is a loopback address, such as 127.0.0.1 or ::1."""
    return _is_address(name) and ip_address(name.partition("%")[0]).is_loopback


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    """'[::1]:8000' -> '::1', 'localhost:8000' -> 'localhost'. What is no host stays as it is."""
    if host.startswith("["):
        name, _, suffix = host[1:].partition("]")
        return name if not suffix or (suffix[0] == ":" and suffix[1:].isdecimal()) else host
    name, colon, port = host.rpartition(":")
    return name if colon and ":" not in name and port.isdecimal() else host
