"""How many prompt tokens a step takes, so that running answers do not stop for long.

A step computes the next tokens of running answers and a chunk of a prompt together, and answers wait until it
ends. Small chunks make the wait short. They also read the weights more often, so a token of a small chunk has
a higher price. The chunk is the largest whose step ends within an aim, but not below the size from which a
token costs little more than in a full step.

Question: For how long may a prompt stop the answers of other requests?
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from moesaic.policy.scheduling.step_prices import Work

QUIET = 5.0
"""Factor on the aim of a step without next tokens. No answer waits for it, but one may arrive meanwhile."""
MOST_COST = 1.15
"""What a prompt token may cost, in units of its price in a full step."""
WEIGHT = 0.5
"""Weight of the last step in the moving average of the scale. Contexts grow from chunk to chunk, so an old
scale means little."""
MEMORY = 0.97
"""Weight of a step in the fit of the shape, in units of that of the next one."""
GRAIN = 16
"""A chunk is a multiple of so many tokens, so that chunks have few sizes."""


class PromptRows(Protocol):
    """Limits the prompt tokens of a step."""

    def limit(self, room: int, decodes: int) -> int:
        """Prompt tokens of a step that has room for `room` of them, beside the rows of `decodes` answers."""
        ...

    def record_step(self, rows: int, seconds: float) -> None:
        """A step with prompt tokens, and so many rows in all, took so long."""
        ...


class AllPromptRows:
    """Steps take as many prompt tokens as they have room for."""

    def limit(self, room: int, decodes: int) -> int:
        return room

    def record_step(self, rows: int, seconds: float) -> None:
        pass


class PricedPromptRows:
    """Steps take as many prompt tokens as end within an aim."""

    def __init__(self, aim: float, work: Work, most_rows: int) -> None:
        """aim: seconds of a step with next tokens. work: that of a step, before one was measured. most_rows:
        of a full step."""
        self._aim, self._most_rows = aim, most_rows
        self._prices = FittedPrices(work)

    def limit(self, room: int, decodes: int) -> int:
        max_rows = min(room, self._most_rows)
        if max_rows <= GRAIN:
            return room
        aim = self._aim if decodes else QUIET * self._aim
        low, high = self._least(), max_rows
        if not self._prices.has_steps or low >= max_rows:
            return min(low, max_rows)
        if self._prices.seconds(decodes + max_rows) <= aim:
            return max_rows
        while high - low > GRAIN:  # the largest size within the aim
            middle = (low + high) // 2
            is_short = self._prices.seconds(decodes + middle) <= aim
            low, high = (middle, high) if is_short else (low, middle)
        return low // GRAIN * GRAIN

    def record_step(self, rows: int, seconds: float) -> None:
        self._prices.record_step(rows, seconds)

    def _least(self) -> int:
        """The fewest rows of which each costs at most MOST_COST of its price in a full step."""
        most_cost = MOST_COST * self._prices.seconds(self._most_rows) / self._most_rows
        rows = GRAIN
        while rows < self._most_rows and self._prices.seconds(rows) > most_cost * rows:
            rows *= 2
        low, high = rows // 2, rows
        while high - low > GRAIN:
            middle = (low + high) // 2
            is_cheap = self._prices.seconds(middle) <= most_cost * middle
            low, high = (low, middle) if is_cheap else (middle, high)
        return min(-(-high // GRAIN) * GRAIN, self._most_rows)


class FittedPrices:
    """How long steps take: reading and computing, each with a factor that is fitted to the steps so far.

    The two factors are the shape: which sizes are cheap. It is fitted by least squares of relative errors,
    with one step of the prior's shape beside those that were measured, and forgets slowly. The scale follows
    the last steps. `StepPrices` learns each number of rows by itself, as decode steps have few; chunks have
    many, so noise would make prices jump from one to the next.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._products = np.zeros((2, 2))
        self._sums = np.zeros(2)
        self._mean_sum = self._weight = 0.0
        self._shape = np.ones(2)
        self._scale = 1.0

    @property
    def has_steps(self) -> bool:
        """Whether a step was measured. Before, only ratios of prices mean anything."""
        return self._weight > 0

    def seconds(self, rows: int) -> float:
        """The price of a step of so many rows."""
        return self._scale * float(self._shape @ self._parts(rows))

    def record_step(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        work = self._work(rows)
        parts, relative = self._parts(rows) / work, seconds / work
        self._products = MEMORY * self._products + np.outer(parts, parts)
        self._sums = MEMORY * self._sums + relative * parts
        self._mean_sum = MEMORY * self._mean_sum + relative
        self._weight = MEMORY * self._weight + 1.0
        mean = self._mean_sum / self._weight
        shape = np.linalg.solve(self._products + np.eye(2), self._sums + mean)
        had_steps, self._shape = self._weight > 1.0, np.maximum(shape, 0.05 * mean)
        ratio = relative / max(float(self._shape @ parts), 1e-300)
        self._scale = (1 - WEIGHT) * self._scale + WEIGHT * ratio if had_steps else ratio

    def _parts(self, rows: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[2] reading and computing."""
        return np.array([self._work.reading(rows), self._work.computing(rows)])
