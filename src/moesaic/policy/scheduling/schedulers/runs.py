"""The runs of the asynchronous scheduler: which units run together, and when the executor may
forget a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.schedulers.actions import Action, Forget, RowSource, RunSegment, StepPlan
from moesaic.policy.scheduling.schedulers.unit import Unit, UnitTable
from moesaic.policy.scheduling.tokenpool import TokenPool, Units


@dataclass(eq=False)
class Run:
    """Rows that were sent to experts together.

    While the same units run together, the object stays the same and only gets another number at each segment.
    """

    number: int
    segment: int
    plan: StepPlan
    slots: IntArray
    """[u] the slots of its units, in the order of the rows. A slot may have another unit by now if its unit
    was dropped."""
    rows: IntArray
    """[u] rows of each unit."""
    starts: IntArray
    """[u] index of its first row."""
    left: int = 0
    """Units that no later run took and that were not dropped."""


class Runs:
    """Numbers the runs. A run is forgotten when its rows were taken and all its parts have arrived."""

    def __init__(self, table: UnitTable, top_k: int) -> None:
        self.count = 0
        self._table = table
        self._top_k = top_k
        self._pool = TokenPool()
        """The parts that experts still have to send back."""
        self._runs: dict[int, Run] = {}
        """Runs whose rows were sent to experts, by number."""

    def __len__(self) -> int:
        """Runs that the executor still keeps, or calls that are not done, whichever are more."""
        return max(len(self._runs), len(self._pool))

    def begin(self, segment: int, slots: IntArray, last: bool) -> tuple[RunSegment, list[Action]]:
        """Begin a run of these units at `segment`. Returns it, and the actions that forget earlier runs.

        Unless `last`, the units then wait for the answers of this segment's experts. When the units are
        exactly the rows of one earlier run, in order, the new run has the same batch object. So data that was
        derived from that batch can be used again.
        """
        table, number, self.count = self._table, self.count, self.count + 1
        previous_run = self._whole_run(slots)
        if previous_run is not None:
            plan, previous_number = previous_run.plan, previous_run.number
            plan_arrays = (
                plan.request_ids,
                plan.epochs,
                plan.sampled_sequences,
                plan.scored_sequences,
                plan.num_draft_tokens,
                plan.following,
            )
            plan = StepPlan(number, plan.batch, *plan_arrays)
            action = RunSegment(plan, segment, [RowSource(previous_number, 0, plan.batch.num_rows)])
            previous_run.left = 0
            forget_actions = self.forget([previous_number])
            if not last:
                table.run[slots] = number
                self._send(previous_run, action)
            return action, forget_actions
        plan = table.plan(number, slots) if segment else table.first_plan(number, slots)
        action = RunSegment(plan, segment, table.sources(slots) if segment else [])
        forget_actions = self.record_taken_rows(slots)
        if not last:
            starts = plan.batch.query_starts[:-1]
            table.run[slots], table.start[slots] = number, starts
            self._send(Run(number, segment, plan, slots, table.rows[slots], starts), action)
        return action, forget_actions

    def record_taken_rows(self, slots: IntArray) -> list[Action]:
        """Record that a later run took these units' rows, or that they were dropped.

        Returns the runs to forget.
        """
        numbers, counts = (one.tolist() for one in self._table.runs(slots))
        for number, count in zip(numbers, counts, strict=True):
            self._runs[number].left -= count
        return self.forget(numbers)

    def drop(self, unit: Unit) -> list[Action]:
        """Drop the unit of a cancelled request. Its parts do not make it ready any more."""
        self._pool.drop(unit.sequence.request_id)
        return self.record_taken_rows(np.array([unit.slot]))

    def record_parts(self, number: int, pairs: IntArray) -> tuple[int, IntArray]:
        """Record parts. Returns the segment at which units are ready now, and the slots of these, in the
        order of the run.
        """
        return self._ready(number, self._pool.receive(number, pairs))

    def finish(self, number: int) -> tuple[int, IntArray]:
        """The same for all parts of a run that have not arrived."""
        return self._ready(number, self._pool.finish(number))

    def _ready(self, number: int, complete: IntArray) -> tuple[int, IntArray]:
        if not len(complete):
            return 0, complete
        run = self._runs[number]
        return run.segment + 1, run.slots if len(complete) == len(run.slots) else run.slots[complete]

    def find_only_run(self, units: int) -> int | None:
        """The run whose rows are all these units in flight, if it is the only one that waits for parts."""
        if len(self._runs) != 1 or len(self._pool) != 1:
            return None
        [(number, run)] = self._runs.items()
        return number if run.left == units == len(run.slots) else None

    def lacking(self, number: int) -> int:
        """Number of parts of a run that have not arrived."""
        return self._pool.lacking(number)

    def completes(self, number: int, pairs: IntArray) -> bool:
        """Whether these are all parts of the run that have not arrived. They are not recorded."""
        return self._pool.completes(number, pairs)

    def forget(self, numbers: list[int]) -> list[Action]:
        """Forget those of these runs that are over.

        A run whose units were all taken may still receive late parts into its memory. It is not over then.
        """
        ended_numbers = [number for number in dict.fromkeys(numbers) if self._is_ended_run(number)]
        for number in ended_numbers:
            del self._runs[number]
        return [Forget(ended_numbers)] if ended_numbers else []

    def abort_run(self, number: int, units: list[Unit]) -> Action:
        """End a run that was stopped, perhaps after it asked its experts. Their answers are ignored."""
        if self._runs.pop(number, None) is not None:
            for unit in units:
                self._pool.drop(unit.sequence.request_id)
            self._pool.receive_units(number, self._pool.missing(number))
        return Forget([number])

    def _whole_run(self, slots: IntArray) -> Run | None:
        """The run whose rows these units are, all of them and in its order. None if there is no such run."""
        run = self._runs.get(int(self._table.run[slots[0]]))
        # The batch of the earlier run can only be used again for the same units in the same order.
        if run is None or len(slots) != len(run.slots):
            return None
        if run.slots is slots and run.left == len(slots):  # the usual case, of which no unit was dropped
            return run
        return run if bool((self._table.run[slots] == run.number).all()) else None

    def _send(self, run: Run, action: RunSegment) -> None:
        """Let the units of this run wait for parts from now on."""
        number, plan = action.plan.step, action.plan
        run.plan, run.number, run.segment, run.left = plan, number, action.segment, len(run.slots)
        ids, epochs, starts = plan.request_ids, plan.epochs, run.starts
        units = Units(number, run.segment, ids, epochs, starts, run.rows, starts)
        self._pool.open(units, self._top_k)
        self._runs[number] = run

    def _is_ended_run(self, number: int) -> bool:
        run = self._runs.get(number)
        return run is not None and not run.left and self._pool.is_complete(number)
