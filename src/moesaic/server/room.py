"""How many connections the limit of open files leaves room for.

Question: How many connections may clients open?
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError

MOST = 16384
"""Maximum number of requests at the same time, where the descriptor limit would allow more."""
SPARE = RESERVE = 64
"""Descriptors for connections beyond the maximum, and for workers and files. A small limit has fewer."""


@dataclass(frozen=True)
class Room:
    """How many connections there may be."""

    served: int
    """Requests at the same time; further ones are answered with 503."""
    spare: int
    """Connections beyond `served`: they ask for /health or /metrics, or they are refused."""

    @classmethod
    def within(cls, limit: int, used: int, wanted: int | None) -> Room:
        """The room that a limit of `limit` descriptors leaves when `used` are open.

        wanted: the value of --max-connections. Raises ConfigError if it is too large for the limit.
        """
        free = limit - used
        spare = min(SPARE, free // 4)
        most = free - spare - min(RESERVE, free // 4)
        if most < 1 or spare < 1:
            raise ConfigError.field("the descriptor limit (ulimit -n)", limit, f"at least {used + 4}")
        if wanted is not None and wanted > most:
            allowed = f"at most {most} with a descriptor limit of {limit}; raise it with ulimit -n"
            raise ConfigError.field("--max-connections", wanted, allowed)
        return cls(min(most, MOST) if wanted is None else wanted, spare)


def room_now(wanted: int | None) -> Room:
    """The room of this process, which has opened everything but its connections. See Room.within."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(list(Path("/dev/fd").iterdir()))
    return Room.within(1 << 20 if limit == resource.RLIM_INFINITY else limit, used, wanted)
