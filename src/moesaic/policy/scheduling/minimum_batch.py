"""Which rows run alone, and which wait for others: what a device's curves say (`core.curves`).

One run of many rows is cheaper than two of fewer rows, where a run has a price of its own. On CPUs that is
reading the weights of the experts. On GPUs a run of few rows takes as long as one of some hundred. Rows that
run alone go on earlier, and a device that would be idle meanwhile is used.

Let c(n) be the seconds of a run of n rows, and c(0) = 0. A part of n rows then costs

    extra(part, n) = c(part) + c(n - part) - c(n)

more than one run of all. Here is when it runs alone:

    a worker with its own device    extra <= SPARED * idle, and idle is its mean idle seconds before a run
    a worker that shares its cores  extra <= LOST * c(n) * part / n, since others use the cores meanwhile
    a call at an expert server      extra(part, 2 * part) <= BEHIND * c(part): another such call will come.
                                    A server with its own device begins at once. Others come meanwhile
    an expert's queue               extra of one run for each expert <= LOST * c(all queues)

Example: the papers' curve has 0.8 up to 128 rows, then it grows in proportion. Half of 256 rows costs nothing
more. Half of 128 rows costs 0.8 more. So it runs alone where the device is idle for 3.2 before each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.core.curves import Curve, DeviceCurves, Thresholds

SHARED_ROWS = 6
"""Rows per expert at which a CPU computes for as long as it reads the weights.

On CPUs this is 5 to 10. It holds for two bytes a weight at 12 to 28 GB/s, and for two flops a weight at 80 to
140 Gflop/s.
"""
CPU_FLOPS = 100e9
"""Flops/s of a CPU whose curve was not measured. With SHARED_ROWS, only ratios of its curves count."""
LOST = 1 / 13
"""Share of a part's seconds that running it alone may cost more where cores are shared."""
SPARED = 0.25
"""Share of a device's idle time that separate runs may take. Rows that part seldom join again soon, so the
price is paid at the following layers too. With all of the idle time, runs became so small that they filled it
(`benchmarks/async_runs.py`, 256 rows a worker)."""
BEHIND = 0.5
"""Runs by which another client's call comes later than the first one, on average."""
ROUNDING = 1e-9
"""Share of a run that does not count: seconds are sums of floats."""
MOST = 1 << 20
"""Thresholds are at most so many rows. Such a threshold means never."""


def cpu_curves(expert: float, others: float, threads: int = 1, measured: float | None = None) -> DeviceCurves:
    """The curves of a CPU that shares its cores. They are straight lines behind the reading of weights.

    expert: weights of a routed expert. others: weights of a layer besides. measured: rows at which computing
    takes as long as reading. None: SHARED_ROWS.
    """
    ratio = float(SHARED_ROWS) if measured is None else measured
    rate = CPU_FLOPS * threads
    row, dense = 2 * expert / rate, 2 * max(others, 1.0) / rate
    how = "assumed" if measured is None else "measured"
    return DeviceCurves(
        f"{how}: reading takes as long as computing {ratio:.1f} rows",
        Curve(((0.0, ratio * dense), (1.0, (ratio + 1) * dense))),
        Curve(((0.0, 0.0), (1.0, row)), per_expert=ratio * row),
        shared=True,
    )


@dataclass(frozen=True)
class Decisions:
    """What the curves of a device say about a model's rows."""

    curves: DeviceCurves
    num_experts: int
    """Experts of a layer."""
    top_k: int
    _seconds: dict[int, float] = field(default_factory=lambda: {0: 0.0}, repr=False, compare=False)
    """What `worker_seconds` has found."""

    _cheapest: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """What the cheapest part of so many rows costs more alone, in seconds, less what it may cost."""

    @property
    def given(self) -> Thresholds:
        """What is given in place of the curves."""
        return self.curves.thresholds

    def worker_seconds(self, rows: int) -> float:
        """Seconds of a worker's run. Where cores are shared, the experts of all its rows count as well.

        They are taken to be all experts of the layer.
        """
        found = self._seconds.get(rows)
        if found is None:
            found = self.curves.attention.seconds(rows)
            if self.curves.shared:
                found += self.curves.experts.seconds(rows * self.top_k, self.num_experts)
            self._seconds[rows] = found
        return found

    def alone(self, part: int, rows: int, idle: float) -> bool:
        """Whether `part` of a worker's `rows` rows run although the others have not come.

        idle: mean seconds for which the worker had nothing to compute before a run.
        """
        if part >= rows:
            return True
        if self.given.separate_rows is not None:
            return part >= self.given.separate_rows
        c = self.worker_seconds
        extra = c(part) + c(rows - part) - c(rows)
        if self.curves.shared:
            return extra <= (LOST * part / rows + ROUNDING) * c(rows)
        return extra <= SPARED * idle + ROUNDING * c(rows)

    def some_alone(self, rows: int, idle: float) -> bool:
        """Whether any part of `rows` rows would run alone."""
        if self.given.separate_rows is not None:
            return rows > max(self.given.separate_rows, 1)
        if rows not in self._cheapest:
            c = np.array([self.worker_seconds(one) for one in range(rows + 1)])
            extra = c[1:-1] + c[-2:0:-1] - c[-1] - ROUNDING * c[-1]
            if self.curves.shared:
                extra -= LOST * c[-1] * np.arange(1, rows) / rows
            self._cheapest[rows] = float(extra.min(initial=math.inf))
        return self._cheapest[rows] <= (0.0 if self.curves.shared else SPARED * idle)

    @property
    def told_rows(self) -> int:
        """Rows of a request above which each part of its answer is told. No part of fewer rows runs alone.

        Where workers have devices of their own it is 0: it depends on how long they are idle.
        """
        if self.given.told_rows is not None:
            return self.given.told_rows
        if self.given.separate_rows is not None:
            return self.given.separate_rows
        if not self.curves.shared:
            return 0
        return _first(lambda rows: rows > 1 and self.alone(rows - 1, rows, 0.0)) - 1

    @property
    def separate_rows(self) -> int:
        """Rows of which a half runs alone, halved: a summary of `alone` for people.

        Where workers have devices of their own, these are never idle.
        """
        return _first(lambda part: self.alone(part, 2 * part, 0.0))

    def waited_pairs(self, experts: int) -> int:
        """Mean pairs of a call from which it begins at once. experts: those of a layer on this server."""
        if self.given.waited_pairs is not None:
            return self.given.waited_pairs
        if not self.curves.shared:
            return 0

        def begins(pairs: int) -> bool:
            one, both = (self.curves.experts.seconds(n * pairs, experts) for n in (1, 2))
            return 2 * one - both <= (BEHIND + ROUNDING) * one

        return _first(begins)

    def queues_apart(self, pairs: Sequence[int]) -> bool:
        """Whether an expert's queue runs alone. pairs: those that wait for each expert of a layer.

        Where cores are shared, no row comes earlier through it.
        """
        if self.given.queue_pairs is not None:
            return max(pairs) >= self.given.queue_pairs
        if self.curves.shared:
            return False
        seconds = self.curves.experts.seconds
        apart, together = sum(seconds(one, 1) for one in pairs), seconds(sum(pairs), len(pairs))
        return apart - together <= (LOST + ROUNDING) * together

    @property
    def has_expert_queues(self) -> bool:
        """Whether any number of pairs makes a queue for each expert pay."""
        return self.queues_apart([MOST, MOST])


def _first(true: Callable[[int], bool]) -> int:
    """The first number from which on `true` holds, 1 to MOST. It holds for all numbers behind it."""
    low, high = 0, 1
    while high < MOST and not true(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high
