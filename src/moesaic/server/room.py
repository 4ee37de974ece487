"""How many connections the limit of open files leaves room for.

Question: How many connections may clients open?
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError

MAX_REQUESTS = 16384
"""Maximum number of requests at the same time, where the descriptor limit would allow more."""
SPARE = RESERVE = 64
"""Descriptors for connections beyond the maximum, and for workers and files. A small limit has fewer."""


@dataclass(frozen=True)
class Room:
    """How many connections there may be."""

    max_requests: int
    """Requests at the same time; further ones are answered with 503."""
    spare_connections: int
    """Connections beyond `served`: they ask for /health or /metrics, or they are refused."""

    @classmethod
    def from_descriptor_limit(cls, limit: int, num_open: int, max_connections: int | None) -> Room:
        """The room that a limit of `limit` descriptors leaves when `num_open` are open.

        max_connections: the value of --max-connections. Raises ConfigError if it is too large for the limit.
        """
        num_free = limit - num_open
        spare = min(SPARE, num_free // 4)
        max_requests = num_free - spare - min(RESERVE, num_free // 4)
        if max_requests < 1 or spare < 1:
            raise ConfigError.field("the descriptor limit (ulimit -n)", limit, f"at least {num_open + 4}")
        if max_connections is not None and max_connections > max_requests:
            requirement = (
                f"at most {max_requests} with a descriptor limit of {limit}; raise it with ulimit -n"
            )
            raise ConfigError.field("--max-connections", max_connections, requirement)
        return cls(min(max_requests, MAX_REQUESTS) if max_connections is None else max_connections, spare)


def room_now(max_connections: int | None) -> Room:
    """The room of this process, which has opened everything but its connections. See Room.within."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_open = len(list(Path("/dev/fd").iterdir()))
    return Room.from_descriptor_limit(
        1 << 20 if limit == resource.RLIM_INFINITY else limit, num_open, max_connections
    )
