"""How long a step of so many rows takes, from a prior and from what was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.policy.scheduling.minimum_batch import SHARED_ROWS

SAMPLES = 15
"""Durations that are kept of each number of rows. Their lower quartile counts: other work only adds."""
WARM = 2
"""First durations of each number of rows that are ignored: the step is recorded then."""

SKIP = 4
"""Only every fourth duration counts, once there are some of its number of rows."""
LEAST_GROWTH = 0.25
"""Power of the prior's growth with the rows. Prices grow at least as fast."""
REFRESH = 64
"""Measurements after which the table of prices should be made anew."""
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """What a step of a model does, as bytes that are read: a prior for its duration.

    Every row passes the dense weights, and `share` of the routed experts of each layer. Experts are taken as
    equally likely. Computing SHARED_ROWS rows takes as long as reading their weights.
    """

    dense_bytes: float
    expert_bytes: float
    share: float

    def __call__(self, rows: int) -> float:
        """The work of a step of so many rows."""
        return self.reading(rows) + self.computing(rows)

    def reading(self, rows: int) -> float:
        """The bytes of the weights that so many rows touch."""
        return self.dense_bytes + self.expert_bytes * (1.0 - (1.0 - self.share) ** rows)

    def computing(self, rows: int) -> float:
        """The products of so many rows, as bytes that take as long to read."""
        return (self.dense_bytes + self.expert_bytes * self.share) * rows / SHARED_ROWS


def work_by_rows(dense_bytes: float, expert_bytes: float, num_experts: int, top_k: int) -> Work:
    """The work of steps of a model.

    dense_bytes, expert_bytes: bytes of all other weights and of all routed experts, of which every row passes
    top_k of num_experts of each layer.

    >>> work = work_by_rows(100, 800, 8, 2)
    >>> round(work(2) / work(1), 2)
    1.57
    """
    return Work(dense_bytes, expert_bytes, top_k / num_experts if num_experts else 0.0)


class StepPrices:
    """The price of a step by its rows. Only ratios of prices mean anything before a step was measured."""

    def __init__(self, prior: Callable[[int], float]) -> None:
        """prior: a price by rows, of which the ratios count, such as bytes that are read."""
        self._prior = prior
        self._samples: dict[int, deque[float]] = {}
        self._num_measurements: dict[int, int] = {}
        self._rows: list[int] = []
        """Numbers of rows that were measured, ascending."""
        self._factors: list[float] = []
        """The duration of each over its prior."""
        self._table: FloatArray = np.zeros(0)
        self.news = 0
        """Measurements since the last `refresh`."""

    def record_duration(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        count = self._num_measurements[rows] = self._num_measurements.get(rows, 0) + 1
        self.news += 1
        # The first steps of a size are recorded as graphs, and later ones are sampled to save time.
        if count <= WARM or (count > SAMPLES and count % SKIP):
            return
        samples = self._samples.setdefault(rows, deque(maxlen=SAMPLES))
        samples.append(seconds)
        factor = sorted(samples)[len(samples) // 4] / self._prior(rows)
        place = bisect_left(self._rows, rows)
        if self._rows[place : place + 1] == [rows]:
            self._factors[place] = factor
        else:
            self._rows.insert(place, rows)
            self._factors.insert(place, factor)

    def price(self, rows: int) -> float:
        """The price of a step: the prior, times the factor that was measured, between the nearest ones."""
        return self._prior(rows) * self._factor(rows)

    def refresh(self) -> None:
        """Let `table` follow the measurements so far."""
        self.news = 0
        self._table = np.zeros(0)

    def table(self, first: int, last: int) -> FloatArray:
        """[last - first + 1] the prices of steps of `first` to `last` rows, as of the last `refresh`.

        Each grows with the rows by at least a part of what the prior says, whatever was measured on a busy
        machine.
        """
        if len(self._table) <= last:
            self._table = self.now(last)
        return self._table[first : last + 1]

    def now(self, last: int) -> FloatArray:
        """[last + 1] the prices of 0 to `last` rows as `table` would have them if it were made now.

        That of no rows means nothing.
        """
        prices = [self.price(1), self.price(1)]
        for rows in range(2, last + 1):
            minimum = prices[-1] * (self._prior(rows) / self._prior(rows - 1)) ** LEAST_GROWTH
            prices.append(max(self.price(rows), minimum))
        return np.array(prices)

    def _factor(self, rows: int) -> float:
        if not self._rows:
            return 1.0
        place = bisect_left(self._rows, rows)
        if place == 0 or place == len(self._rows):
            return self._factors[min(place, len(self._rows) - 1)]
        low, high = self._rows[place - 1], self._rows[place]
        share = (rows - low) / (high - low)
        return (1 - share) * self._factors[place - 1] + share * self._factors[place]
