"""Where a process is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Addresses at which one process accepts connections."""

    address: str
    """unix:PATH, unix:@NAME or tcp:HOST:PORT, for processes of the same host."""
    remote: str = ""
    """tcp:HOST:PORT, for processes of other hosts. Empty: `address` is for all."""
    host: str = ""
    """Host of the process (`transport.host`). Empty: not known, and `address` is for all."""

    def address_for(self, host: str) -> str:
        """The address at which a process of `host` connects.

        >>> Endpoint("unix:@a", "tcp:10.0.0.2:80", "one").address_for("two")
        'tcp:10.0.0.2:80'
        """
        return self.remote if self.remote and self.host != host else self.address


NO_ENDPOINT = Endpoint("")
"""The endpoint of a process that has not said where it is reached."""
