"""Times functions that can be run repeatedly."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
Show = Callable[[str, int, int], None]
"""A callback that is called with what is measured, the figures so far, and the number of figures."""

SHORTEST = 0.01
"""Minimum seconds of one timing. A faster function is run several times for each timing."""


def _do_not_wait() -> None:
    """Wait for nothing: a CPU has finished when the call returns."""


@dataclass(frozen=True)
class Stopwatch:
    """Measures how long functions take."""

    limit: float
    """Seconds to spend on each figure."""
    clock: Clock = time.perf_counter
    wait: Callable[[], None] = _do_not_wait
    """A function that waits until the device has finished all its work."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one run: the median of the timings that fit into `limit`, after a first run that does
        not count.

        If the first run takes longer than `limit`, it is the only one and counts.
        """
        # A clock may stand still during a fast run, and figures divide by these seconds.
        first = max(self._time_runs(run, 1), 1e-9)
        if first >= self.limit:
            return first
        times = math.ceil(SHORTEST / first)
        start = self.clock()
        timings = [self._time_runs(run, times) / times]
        while self.clock() - start < self.limit:
            timings.append(self._time_runs(run, times) / times)
        return max(statistics.median(timings), 1e-9)

    def _time_runs(self, run: Callable[[], object], times: int) -> float:
        self.wait()
        start = self.clock()
        for _ in range(times):
            run()
        self.wait()
        return self.clock() - start
