"""Units that are ready to run, place by place, and when so many are ready that a run is worth its cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.policy.brain.unit import Unit
from moesaic.policy.microqueue import FloatArray


class Ready:
    """A queue for each place. What a policy asks for is kept, not counted anew for each choice."""

    def __init__(self, places: int) -> None:
        self._units: list[list[Unit]] = [[] for _ in range(places)]
        self.tokens: IntArray = np.zeros((places, 1), dtype=np.int64)
        """[places, 1] rows that wait."""

    def add(self, unit: Unit, now: float) -> None:
        """Behind the others of its place."""
        unit.since = now
        self._units[unit.place].append(unit)
        self.tokens[unit.place] += unit.rows

    def discard(self, unit: Unit) -> None:
        """Take it out, if it waits anywhere."""
        if unit in self._units[unit.place]:
            self._units[unit.place].remove(unit)
            self.tokens[unit.place] -= unit.rows

    def take(self, place: int) -> list[Unit]:
        """All of a place, oldest first."""
        units, self._units[place] = self._units[place], []
        self.tokens[place] = 0
        return units

    def units(self, place: int) -> int:
        return len(self._units[place])

    def waited(self, now: float) -> FloatArray:
        """[places, 1] seconds that the oldest unit of each place has waited; 0 where there is none."""
        return np.array([[now - units[0].since if units else 0.0] for units in self._units])


@dataclass(frozen=True)
class Gather:
    """Whether a run may begin while experts still compute for others of the same worker.

    A run has a fixed cost, here and at every server that it asks, so rows that go on in small groups make
    each other slower. The paper's schedulers never wait. Here a group waits until it is at least `share` of
    the rows, or of the units, that are under way (a chunk of a prompt has many rows, decodes are many units);
    when no answer is out any more it runs in any case.
    """

    share: float = 0.0
    """0: never waits; 1: all go together."""

    def enough(self, rows: int, units: int, all_rows: int, all_units: int) -> bool:
        """Example: share 0.5; 3 of 8 rows and 2 of 4 units are enough."""
        return rows >= self.share * all_rows or units >= self.share * all_units
