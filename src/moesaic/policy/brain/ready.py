"""Units that are ready to run, place by place, and when so many are ready that a run is worth its cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.policy.brain.unit import Unit
from moesaic.policy.microqueue import FloatArray

BoolArray = npt.NDArray[np.bool_]


class Ready:
    """A queue for each place. What a policy asks for is kept, not counted anew for each choice."""

    def __init__(self, places: int) -> None:
        self.tokens: IntArray = np.zeros((places, 1), dtype=np.int64)
        """[places, 1] rows that wait."""
        self.units: IntArray = np.zeros((places, 1), dtype=np.int64)
        """[places, 1] units that wait."""
        self._queues: list[list[Unit]] = [[] for _ in range(places)]

    def add(self, unit: Unit, now: float) -> None:
        """Behind the others of its place."""
        unit.since = now
        self._queues[unit.place].append(unit)
        self._count(unit, 1)

    def discard(self, unit: Unit) -> None:
        """Take it out, if it waits anywhere."""
        if unit in self._queues[unit.place]:
            self._queues[unit.place].remove(unit)
            self._count(unit, -1)

    def take(self, place: int) -> list[Unit]:
        """All of a place, oldest first."""
        units, self._queues[place] = self._queues[place], []
        self.tokens[place] = self.units[place] = 0
        return units

    def _count(self, unit: Unit, sign: int) -> None:
        self.tokens[unit.place] += sign * unit.rows
        self.units[unit.place] += sign

    def waited(self, now: float) -> FloatArray:
        """[places, 1] seconds that the oldest unit of each place has waited; 0 where there is none."""
        return np.array([[now - queue[0].since if queue else 0.0] for queue in self._queues])


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

    def enough(self, ready: Ready, all_rows: int, all_units: int) -> BoolArray:
        """[places, 1] where a run may begin. all_rows and all_units: of everything under way.

        Example: share 0.5; 3 of 8 rows and 2 of 4 units are enough.
        """
        enough: BoolArray = (ready.tokens >= self.share * all_rows) | (ready.units >= self.share * all_units)
        return enough
