"""Units that are ready to run, by segment, and the rule for how many make a run efficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import FloatArray
from moesaic.policy.scheduling.schedulers.unit import Unit


@dataclass(eq=False)
class _Group:
    """Units that became ready at the same time, at the same segment."""

    units: list[Unit]
    since: float


class ReadyQueues:
    """A queue for each segment. Row counts are maintained, not computed again for each choice."""

    def __init__(self, segments: int) -> None:
        self._rows = [0] * segments
        self._queues: list[list[_Group]] = [[] for _ in range(segments)]

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        return any(self._rows)

    @property
    def tokens(self) -> IntArray:
        """[segments, 1] rows that wait at each segment."""
        return np.array(self._rows)[:, None]

    def add(self, units: list[Unit], now: float) -> None:
        """Queue units of one segment, in the order of their run."""
        if units:
            segment = units[0].segment
            self._queues[segment].append(_Group(units, now))
            self._rows[segment] += sum(unit.rows for unit in units)

    def discard(self, unit: Unit) -> None:
        """Remove the unit if it waits in a queue."""
        queue = self._queues[unit.segment]
        for group in [one for one in queue if unit in one.units]:
            group.units = [one for one in group.units if one is not unit]
            self._rows[unit.segment] -= unit.rows
            if not group.units:
                queue.remove(group)

    def take(self, segment: int) -> list[Unit]:
        """Remove and return all units of a segment.

        They come in the order of the runs that computed their rows. At segment 0, where units begin, the
        oldest comes first.
        """
        groups, self._queues[segment] = self._queues[segment], []
        self._rows[segment] = 0
        if len(groups) == 1:
            return groups[0].units
        units = [unit for group in groups for unit in group.units]
        return sorted(units, key=_row_position) if segment else units

    def waited(self, now: float) -> FloatArray:
        """[segments, 1] seconds that the oldest unit of each segment has waited, 0 for an empty queue."""
        return np.array([[now - queue[0].since if queue else 0.0] for queue in self._queues])


def _row_position(unit: Unit) -> tuple[int, int]:
    assert unit.run is not None
    return unit.run.number, unit.start


class GatherRule(Protocol):
    """Decides when a run may begin while experts still compute for other units of the same worker.

    A run has a price of its own, so small runs slow each other down (`minimum_batch`). The schedulers of the
    paper never wait. When no expert computes for this worker any more, the run begins in any case.
    """

    def alone(self, part: int, rows: int, idle: float) -> bool:
        """Whether `part` rows at one segment run before all `rows` decodes in flight are there.

        It must be true where part >= rows: decodes do not wait for a prompt chunk.
        idle: mean seconds for which this worker had nothing to compute before a run.
        """
        ...


@dataclass(frozen=True)
class RunThreshold:
    """A GatherRule of one number."""

    rows: int = 0
    """Rows from which a run may begin. 0 means any number."""

    def alone(self, part: int, rows: int, idle: float) -> bool:
        """See GatherRule.

        >>> RunThreshold(8).alone(8, 20, 0.0), RunThreshold(8).alone(5, 20, 0.0)
        (True, False)
        """
        return part >= min(self.rows, rows)
