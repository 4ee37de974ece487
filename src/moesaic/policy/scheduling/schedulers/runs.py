"""The runs of the asynchronous scheduler: which units run together, and when the executor may
forget a run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import Action, Forget, RowSource, RunSegment, StepPlan
from moesaic.policy.scheduling.schedulers.step_plan import step_plan
from moesaic.policy.scheduling.schedulers.unit import Run, Unit, sources
from moesaic.policy.scheduling.tokenpool import TokenPool, Units


class Runs:
    """Numbers the runs. A run is forgotten when its rows were taken and all its parts have arrived."""

    def __init__(self, blocks: KVBlocks, top_k: int) -> None:
        self.count = 0
        self._blocks = blocks
        self._top_k = top_k
        self._pool = TokenPool()
        """The parts that experts still have to send back."""
        self._runs: dict[int, Run] = {}
        """Runs whose rows were sent to experts, by number."""

    def __len__(self) -> int:
        """Runs that the executor still keeps, or calls that are not done, whichever are more."""
        return max(len(self._runs), len(self._pool))

    def begin(self, segment: int, units: list[Unit], last: bool) -> tuple[RunSegment, list[Action]]:
        """Begin a run of these units at `segment`. Returns it, and the actions that forget earlier runs.

        Unless `last`, the units then wait for the answers of this segment's experts. When the units are
        exactly the rows of one earlier run, in order, the new run has the same batch object. So data that was
        derived from that batch can be used again.
        """
        number, self.count = self.count, self.count + 1
        before = _common_run(units)
        if before is not None:
            everything = RowSource(before.number, 0, before.plan.batch.num_rows)
            action = RunSegment(replace(before.plan, step=number), segment, [everything])
            before.left = 0
            left = self.forget([before.number])
            if not last:
                self._send(before, action)
            return action, left
        plan = step_plan(number, [(unit.sequence, unit.rows) for unit in units], self._blocks)
        action = RunSegment(plan, segment, sources(units))
        left = self.taken(units)
        if not last:
            run = Run(number, segment, plan, units, _waiting(plan))
            for unit, start in zip(units, plan.batch.query_starts[:-1].tolist(), strict=True):
                unit.run, unit.start = run, start
            self._send(run, action)
        return action, left

    def taken(self, units: list[Unit]) -> list[Action]:
        """Record that a later run took these units' rows, or that they were dropped.

        Returns the runs to forget.
        """
        runs = [unit.run for unit in units if unit.run is not None]
        for run in runs:
            run.left -= 1
        return self.forget([run.number for run in runs])

    def drop(self, unit: Unit) -> list[Action]:
        """Drop the unit of a cancelled request. Its parts do not make it ready any more."""
        self._pool.drop(unit.sequence.request_id)
        return self.taken([unit])

    def arrived(self, number: int, pairs: IntArray) -> list[Unit]:
        """Record parts. Returns the units that they complete, in the order of the run."""
        complete = self._pool.arrived(number, pairs)
        if complete is None:
            return []
        units = self._runs[number].units
        if len(complete) == len(units):
            return units
        ids = set(complete.request_ids.tolist())
        return [unit for unit in units if unit.sequence.request_id in ids]

    def forget(self, numbers: list[int]) -> list[Action]:
        """Forget those of these runs that are over.

        A run whose units were all taken may still receive late parts into its memory. It is not over then.
        """
        over = [number for number in dict.fromkeys(numbers) if self._over(number)]
        for number in over:
            del self._runs[number]
        return [Forget(over)] if over else []

    def failed(self, number: int, units: list[Unit]) -> Action:
        """End a run that was stopped, perhaps after it asked its experts. Their answers are ignored."""
        if self._runs.pop(number, None) is not None:
            for unit in units:
                self._pool.drop(unit.sequence.request_id)
            self._pool.arrived(number, self._pool.missing(number))
        return Forget([number])

    def _send(self, run: Run, action: RunSegment) -> None:
        """Let the units of this run wait for parts from now on."""
        number, segment = action.plan.step, action.segment
        run.plan, run.number, run.segment, run.left = action.plan, number, segment, len(run.units)
        run.waiting = replace(run.waiting, call=number, layer=segment)
        self._pool.open(run.waiting, self._top_k)
        self._runs[number] = run

    def _over(self, number: int) -> bool:
        run = self._runs.get(number)
        return run is not None and not run.left and self._pool.done(number)


def _waiting(plan: StepPlan) -> Units:
    """The run's units for the token pool. `_send` sets their layer."""
    starts = plan.batch.query_starts[:-1]
    rows, positions = np.diff(plan.batch.query_starts), plan.batch.positions[starts]
    return Units(plan.step, 0, plan.request_ids, plan.epochs, positions, rows, starts)


def _common_run(units: list[Unit]) -> Run | None:
    """The run whose rows these units are, all of them and in its order. None if there is no such run."""
    run = units[0].run
    whole = run is not None and len(units) == len(run.units) and all(unit.run is run for unit in units)
    return run if whole else None
