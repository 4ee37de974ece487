"""The recent load of each expert and each server, from the servers' reports."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moesaic.core.metrics import ExpertServerStats
from moesaic.core.tokens import IntArray
from moesaic.policy.placement import balance

INTERVALS = 10
"""Number of intervals in a window."""


class _Server:
    """Counts of one server. The reports of each of its processes start at zero."""

    def __init__(self, layers: int, experts: int, intervals: int) -> None:
        self.incarnation = -1
        self.window = balance.LoadWindow(layers, experts, intervals)
        self.fresh = np.zeros((layers, experts), dtype=np.int64)
        """[L, E] pairs since the interval began."""
        self.last_pairs = self.fresh
        """[L, E] pairs in the process's last report."""
        self.busy: list[float] = [0.0]
        """Busy seconds in each interval; the last interval is under way."""
        self.busy_seconds = 0.0


class Loads:
    """Load in a sliding window of `seconds`, which has `INTERVALS` intervals."""

    def __init__(self, layers: int, experts: int, seconds: float) -> None:
        self._shape = layers, experts
        self._interval = seconds / INTERVALS
        self._ends: float | None = None
        self._servers: dict[int, _Server] = {}
        self.total: IntArray = np.zeros(self._shape, dtype=np.int64)
        """[L, E] pairs that all servers, past ones included, have computed so far."""

    def add_report(
        self, server: int, incarnation: int, stats: ExpertServerStats, load: list[list[int]]
    ) -> None:
        """Adds a report of a server's process.

        load: [L][E] pairs since the process started; empty means no pairs since the last report. Example:
        reports [[5, 0]] and [[8, 1]] of one process, then [[2, 0]] of its successor -> 10 and 1 pairs.
        """
        record = self._servers.get(server)
        if record is None:
            record = self._servers[server] = _Server(*self._shape, INTERVALS)
        if incarnation != record.incarnation:
            record.incarnation, record.busy_seconds = incarnation, 0.0
            record.last_pairs = np.zeros(self._shape, dtype=np.int64)
        record.busy[-1] += stats.busy_seconds - record.busy_seconds
        record.busy_seconds = stats.busy_seconds
        if load:
            pairs = np.array(load, dtype=np.int64)
            if pairs.shape == self._shape:
                # Reports count from the start of the process, so only the difference is new.
                record.fresh = record.fresh + pairs - record.last_pairs
                self.total = self.total + pairs - record.last_pairs
                record.last_pairs = pairs

    def tick(self, now: float, servers: Collection[int]) -> None:
        """Ends the interval if its time is over. Servers that are not in `servers` are forgotten."""
        if self._ends is None:
            self._ends = now + self._interval
        if now < self._ends:
            return
        self._ends = now + self._interval
        self._servers = {number: self._servers[number] for number in servers if number in self._servers}
        for record in self._servers.values():
            record.window.add(record.fresh)
            record.fresh = np.zeros(self._shape, dtype=np.int64)
            record.busy = [*record.busy[-INTERVALS:], 0.0]

    def window(self) -> IntArray:
        """Returns [L, E] pairs in the window."""
        totals = np.zeros(self._shape, dtype=np.int64)
        for record in list(self._servers.values()):
            totals += record.window.totals
        return totals

    def has_full_window(self) -> bool:
        """Whether every server has reports for the whole window."""
        windows = [len(record.window) for record in self._servers.values()]
        return bool(windows) and min(windows) == INTERVALS

    def balancedness(self) -> np.ndarray:
        """Returns [L] mean / max of the servers' pairs in the window; 1 is perfect balance."""
        columns = [record.window.totals.sum(axis=1) for record in list(self._servers.values())]
        if not columns:
            return np.ones(self._shape[0])
        return balance.balancedness(np.stack(columns, axis=1))

    def utilisation(self) -> float:
        """Returns the mean share of the window, 0 to 1, during which servers computed."""
        shares = [
            sum(record.busy[:-1]) / (self._interval * len(record.busy[:-1]))
            for record in self._servers.values()
            if len(record.busy) > 1
        ]
        return min(1.0, sum(shares) / len(shares)) if shares else 0.0
