"""A process joins a running cluster over TCP, and joins again each time that its connection was lost.

A cluster gives up a process that was silent for too long. A process that was frozen or cut off then finds its
connection closed. The cluster cannot restart such a process, so it joins again as a new one.

Question: How does a process of another host join?
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moesaic.cluster.joining.options import OnJoined
from moesaic.core.errors import ConnectionLost
from moesaic.transport.authentication import PeerRefused, RefusedByCluster

DELAYS = (0.5, 0.5, *(1.0,) * 9, *(2.0,) * 24)
"""Seconds before each attempt to join again. Within their sum, about a minute, `serve` may be restarted."""
REFUSALS = 3
"""Number of attempts to join again after which a refusal in the handshake counts.

Such a refusal is not authenticated: a bit that was changed on the way causes one too.
"""


def join(
    serve_once: Callable[[OnJoined], int],
    on_joined: OnJoined,
    on_lost: Callable[[ConnectionLost], None] = lambda lost: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Serve until the cluster shuts this process down. Returns the exit code 0.

    serve_once: joins once and serves until the connection breaks, such as `joining.server.serve_once`. It
    calls its argument once it has joined.
    on_joined: called each time the process has joined, with the path of what it serves.
    on_lost: called each time the connection broke after that. The process then joins again, after DELAYS.

    Raises ConfigError for settings that cannot work. Raises ConnectionLost when the cluster cannot be reached
    the first time, refuses the process, or does not come back.
    """
    tries: int | None = None
    """Attempts to join since the process was last in the cluster. None before it joined the first time."""

    def reset_tries(model: str) -> None:
        nonlocal tries
        tries = 0
        on_joined(model)

    while True:
        try:
            return serve_once(reset_tries)
        except ConnectionLost as error:
            if tries is None or isinstance(error, RefusedByCluster):
                raise
            if isinstance(error, PeerRefused) and tries >= REFUSALS:
                raise
            if tries == len(DELAYS):
                raise ConnectionLost(f"{error}; given up after {tries} attempts to join again") from error
            if not tries:
                on_lost(error)
        sleep(DELAYS[tries])
        tries += 1
