"""Units that are ready to run, by segment, and the rule for how many make a run efficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.microqueue import FloatArray
from moesaic.policy.scheduling.minimum_batch import Load
from moesaic.policy.scheduling.schedulers.unit import UnitTable


@dataclass(eq=False)
class _Group:
    """Units that became ready at the same time, at the same segment."""

    slots: IntArray
    waiting_since: float


class ReadyQueues:
    """A queue for each segment. Row counts are maintained, not computed again for each choice."""

    def __init__(self, segments: int, table: UnitTable) -> None:
        self._table = table
        self._rows: dict[int, int] = {}
        """Rows of each segment at which rows wait."""
        self._queues: list[list[_Group]] = [[] for _ in range(segments)]

    def __bool__(self) -> bool:
        """Whether any unit waits."""
        return bool(self._rows)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(segment, rows) of the segments at which rows wait."""
        return list(self._rows.items())

    @property
    def tokens(self) -> IntArray:
        """[segments, 1] rows that wait at each segment."""
        tokens = np.zeros((len(self._queues), 1), dtype=np.int64)
        for segment, rows in self._rows.items():
            tokens[segment, 0] = rows
        return tokens

    def add(self, segment: int, slots: IntArray, now: float, rows: int | None = None) -> None:
        """Queue units of one segment, in the order of their run. rows: theirs, if they are known."""
        if len(slots):
            self._queues[segment].append(_Group(slots, now))
            rows = int(self._table.rows[slots].sum()) if rows is None else rows
            self._rows[segment] = self._rows.get(segment, 0) + rows

    def discard(self, slot: int) -> None:
        """Remove the unit if it waits in a queue."""
        for segment, _ in self.rows:
            queue = self._queues[segment]
            for group in [one for one in queue if slot in one.slots]:
                group.slots = group.slots[group.slots != slot]
                self._rows[segment] -= int(self._table.rows[slot])
                if not len(group.slots):
                    queue.remove(group)
            if not queue:
                del self._rows[segment]

    def take(self, segment: int) -> IntArray:
        """Remove and return the slots of all units of a segment.

        They come in the order of the runs that computed their rows. At segment 0, where units begin, the
        oldest comes first.
        """
        groups, self._queues[segment] = self._queues[segment], []
        del self._rows[segment]
        if len(groups) == 1:
            return groups[0].slots
        slots = np.concatenate([group.slots for group in groups])
        if not segment:
            return slots
        order = (self._table.run[slots] << 32) + self._table.start[slots]
        sorted_slots: IntArray = slots[order.argsort()]
        return sorted_slots

    def wait_seconds(self, now: float) -> FloatArray:
        """[segments, 1] seconds that the oldest unit of each segment has waited, 0 for an empty queue."""
        wait_seconds = np.zeros((len(self._queues), 1))
        for segment, _ in self.rows:
            wait_seconds[segment, 0] = now - self._queues[segment][0].waiting_since
        return wait_seconds


class GatherRule(Protocol):
    """Decides when a run may begin while experts still compute for other units of the same worker.

    A run has a price of its own, so small runs slow each other down (`minimum_batch`). The schedulers of the
    paper never wait. When no expert computes for this worker any more, the run begins in any case.
    """

    def runs_alone(self, part: int, load: Load) -> bool:
        """Whether `part` rows at one segment run before all rows in flight are there.

        It must be true where `part` is all rows in flight.
        """
        ...

    def begins(self, requests: int, load: Load) -> bool:
        """Whether so many requests begin while rows of others are under way.

        If not, they begin with the next rows that have passed all layers.
        """
        ...

    def any_part_runs_alone(self, load: Load) -> bool:
        """Whether any part of the rows would run alone."""
        ...


@dataclass(frozen=True)
class RunThreshold:
    """A GatherRule of one number."""

    rows: int = 0
    """Rows from which a run may begin. 0 means any number."""

    def runs_alone(self, part: int, load: Load) -> bool:
        """Whether `part` rows run before all rows are there. Decodes do not wait for the chunk of a prompt.

        >>> [RunThreshold(8).runs_alone(part, Load(20, 20)) for part in (8, 5)]
        [True, False]
        """
        return part >= min(self.rows, load.decodes)

    def begins(self, requests: int, load: Load) -> bool:
        """Requests always begin at once."""
        return True

    def any_part_runs_alone(self, load: Load) -> bool:
        """Whether the threshold is below the decodes in flight."""
        return load.decodes > max(self.rows, 1)
