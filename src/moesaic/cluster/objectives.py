"""Latency objectives, and how often they are missed. Tokens are counted on their way to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from moesaic.config import ClusterConfig


class Objectives:
    """Latency limits in seconds; None: no limit. `clock` is the clock of `Request.arrival`.

    Example: limits of 1 and 0.1, a request that arrives at 5: tokens at 6.5, 6.55 and 7 miss the first and
    the second limit once each.
    """

    def __init__(
        self,
        ttft: float | None = None,
        itl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttft = ttft
        self._itl = itl
        self._clock = clock
        self.missed_ttft = 0
        """Requests whose first token came too late after their arrival."""
        self.missed_itl = 0
        """Tokens that came too late after the token before."""

    @classmethod
    def from_config(cls, cluster: ClusterConfig, clock: Callable[[], float]) -> Objectives:
        """The objectives of --slo-ttft and --slo-itl, which are in milliseconds."""
        ttft, itl = (None if ms is None else ms / 1e3 for ms in (cluster.slo_ttft, cluster.slo_itl))
        return cls(ttft, itl, clock)

    @property
    def total_misses(self) -> int:
        """Misses of both objectives."""
        return self.missed_ttft + self.missed_itl

    def record_token(self, arrival: float, last: float | None) -> float | None:
        """Counts a token that arrives now. Returns the time, or None without limits.

        arrival: time of its request. last: what this method returned for the token before; None for the
        first token.
        """
        if self._ttft is None and self._itl is None:
            return None
        now = self._clock()
        if last is None:
            self.missed_ttft += self._ttft is not None and now - arrival > self._ttft
        else:
            self.missed_itl += self._itl is not None and now - last > self._itl
        return now
