"""How many prompt tokens a step takes, so that running answers do not stop for long.

A step computes the next tokens of running answers and a chunk of a prompt together, and answers wait until it
ends. Small chunks make the wait short. They also read the weights more often, so a token of a small chunk has
a higher price. The chunk is the largest whose step ends within an aim, but not below the size from which a
token costs little more than in a full step.

Question: For how long may a prompt stop the answers of other requests?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

QUIET = 5.0
"""Factor on the aim of a step without next tokens. No answer waits for it, but one may arrive meanwhile."""
MOST_COST = 1.15
"""What a prompt token may cost, in units of its price in a full step."""
WEIGHT = 0.5
"""Weight of the last step in the moving average of a size's factor. Contexts grow from chunk to chunk, so an
old factor means little."""
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

    def __init__(self, aim: float, prior: Callable[[int], float], most_rows: int) -> None:
        """aim: seconds of a step with next tokens. most_rows: of a full step.

        prior: a price by rows, of which the ratios count (`step_prices.work_by_rows`).
        """
        self._aim, self._prior, self._most_rows = aim, prior, most_rows
        self._factors: dict[int, float] = {}
        """Seconds of a step over its prior, by the number of bits of its rows."""

    def limit(self, room: int, decodes: int) -> int:
        max_rows = min(room, self._most_rows)
        if max_rows <= GRAIN:
            return room
        aim = self._aim if decodes else QUIET * self._aim
        low, high = self._least(), max_rows
        if not self._factors or low >= max_rows:
            return min(low, max_rows)
        while high - low > GRAIN:  # the largest size within the aim
            middle = (low + high) // 2
            low, high = (middle, high) if self._seconds(decodes + middle) <= aim else (low, middle)
        return (
            max_rows
            if high == max_rows and self._seconds(decodes + max_rows) <= aim
            else low // GRAIN * GRAIN
        )

    def record_step(self, rows: int, seconds: float) -> None:
        factor, size = seconds / self._prior(rows), rows.bit_length()
        self._factors[size] = (
            factor if size not in self._factors else ((1 - WEIGHT) * self._factors[size] + WEIGHT * factor)
        )

    def _seconds(self, rows: int) -> float:
        """The price of a step: its prior, times the factor of the nearest size that was measured."""
        size = rows.bit_length()
        nearest = min(self._factors, key=lambda measured_size: abs(measured_size - size), default=0)
        return self._prior(rows) * self._factors.get(nearest, 1.0)

    def _least(self) -> int:
        """The fewest rows of which each costs at most MOST_COST of its price in a full step."""
        most_cost = MOST_COST * self._seconds(self._most_rows) / self._most_rows
        rows = GRAIN
        while rows < self._most_rows and self._seconds(rows) > most_cost * rows:
            rows *= 2
        low, high = rows // 2, rows
        while high - low > GRAIN:
            middle = (low + high) // 2
            low, high = (low, middle) if self._seconds(middle) <= most_cost * middle else (middle, high)
        return min(-(-high // GRAIN) * GRAIN, self._most_rows)
