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


def _at_once() -> None:
    """Wait for nothing: a CPU has finished when the call returns."""


@dataclass(frozen=True)
class Stopwatch:
    """Measures how long functions take."""

    limit: float
    """Seconds to spend on each figure."""
    clock: Clock = time.perf_counter
    wait: Callable[[], None] = _at_once
    """A function that waits until the device has finished all its work."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one run: the median of the timings that fit into `limit`, after a first run that does
        not count.

        If the first run takes longer than `limit`, it is the only one and counts.
        """
        first = max(self._timed(run, 1), 1e-9)
        if first >= self.limit:
            return first
        times = math.ceil(SHORTEST / first)
        begun = self.clock()
        taken = [self._timed(run, times) / times]
        while self.clock() - begun < self.limit:
            taken.append(self._timed(run, times) / times)
        return max(statistics.median(taken), 1e-9)

    def _timed(self, run: Callable[[], object], times: int) -> float:
        self.wait()
        begun = self.clock()
        for _ in range(times):
            run()
        self.wait()
        return self.clock() - begun
