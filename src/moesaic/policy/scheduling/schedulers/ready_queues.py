"""Units that are ready to run, segment by segment, and when so many are ready that a run is worth its
cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import FloatArray
from moesaic.policy.scheduling.schedulers.unit import Unit

BoolArray = npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Group:
    """Units that became ready at the same time, at the same segment."""

    units: list[Unit]
    since: float


class ReadyQueues:
    """A queue for each segment. What a policy asks for is kept, not counted anew for each choice."""

    def __init__(self, segments: int) -> None:
        self._rows = [0] * segments
        self._queues: list[list[_Group]] = [[] for _ in range(segments)]

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        return any(self._rows)

    @property
    def tokens(self) -> IntArray:
        """[segments, 1] rows that wait."""
        return np.array(self._rows)[:, None]

    def add(self, units: list[Unit], now: float) -> None:
        """Units of one segment, in the order of their run."""
        if units:
            segment = units[0].segment
            self._queues[segment].append(_Group(units, now))
            self._rows[segment] += sum(unit.rows for unit in units)

    def discard(self, unit: Unit) -> None:
        """Take it out, if it waits anywhere."""
        queue = self._queues[unit.segment]
        for group in [one for one in queue if unit in one.units]:
            group.units = [one for one in group.units if one is not unit]
            self._rows[unit.segment] -= unit.rows
            if not group.units:
                queue.remove(group)

    def take(self, segment: int) -> list[Unit]:
        """All of a segment, in the order of the runs that they come from; at segment 0, where they begin,
        oldest first."""
        groups, self._queues[segment] = self._queues[segment], []
        self._rows[segment] = 0
        if len(groups) == 1:
            return groups[0].units
        units = [unit for group in groups for unit in group.units]
        return sorted(units, key=_where) if segment else units

    def waited(self, now: float) -> FloatArray:
        """[segments, 1] seconds that the oldest unit of each segment has waited; 0 where there is none."""
        return np.array([[now - queue[0].since if queue else 0.0] for queue in self._queues])


def _where(unit: Unit) -> tuple[int, int]:
    assert unit.run is not None
    return unit.run.number, unit.start


@dataclass(frozen=True)
class RunThreshold:
    """Whether a run may begin while experts still compute for others of the same worker.

    A run has a fixed cost, here and at every server that it asks: weights are read for it. Rows that go on in
    small groups make each other slower. The paper's schedulers never wait. Here a group waits until it has
    the rows that are worth a run, or as many as there are decodes under way, which do not wait for the chunk
    of a prompt; when no answer is out any more it runs in any case.
    """

    rows: int = 0
    """Worth a run; 0: whatever is there."""

    def enough(self, ready: IntArray, decodes: int) -> BoolArray:
        """[segments, 1] where a run may begin. ready: [segments, 1] rows; decodes: under way, a row each.

        Example: 8 rows are worth a run. Of 20 decodes 8 at one segment are enough, of 5 only all 5.
        """
        enough: BoolArray = ready >= min(self.rows, decodes)
        return enough
