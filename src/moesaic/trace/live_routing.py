"""The routing of recent requests, for placements that follow it while they serve (`--rebalance routing`)."""

from __future__ import annotations

import threading

from moesaic.core.profile import Profile, Routes
from moesaic.core.routing import RoutedModel
from moesaic.core.tally import Tally


class LiveRouting:
    """Recorded requests since the last `take`. One thread adds, another takes."""

    def __init__(self, most_bytes: int, interval: float) -> None:
        """most_bytes: maximum memory. interval: seconds between two looks at what workers recorded."""
        self.interval = interval
        self._max_bytes = most_bytes
        self._lock = threading.Lock()
        self._tally: Tally | None = None

    def add(self, model: RoutedModel, routes: Routes) -> None:
        """Add requests that have ended."""
        with self._lock:
            if self._tally is None:
                self._tally = Tally(model, self._max_bytes)
            self._tally.add(routes)

    @property
    def size(self) -> tuple[int, int]:
        """Requests and tokens since the last `take`."""
        with self._lock:
            return (0, 0) if self._tally is None else (self._tally.requests, self._tally.tokens)

    def take(self) -> Profile | None:
        """The profile of these requests. Begins anew. None: there were none."""
        with self._lock:
            tally, self._tally = self._tally, None
        return None if tally is None else tally.profile()
