"""The scheduler of synchronous expert parallelism: what today's engines do, and the other schedules'
baseline.

All attention workers go through a step together. At the experts of every layer each waits for all: a server
computes when every worker's rows for that layer are in (an all-to-all), and answers all (another one). A
worker without requests takes part with no rows, as the others would wait for it for ever.
"""

from __future__ import annotations

from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    BarrierPassed,
    EnterBarrier,
    Event,
    StepDone,
    StepFailed,
)
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler


class BarrierScheduler(LockstepScheduler):
    """Enters each step through a gate that opens when every worker is there and some have work."""

    def __init__(self, limits: BatchLimits, blocks: KVBlocks) -> None:
        super().__init__(limits, blocks)
        self._open = False
        self._said: bool | None = None
        """What the gate was told of this step."""

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, BarrierPassed):
            self._open = True
            return self._next_steps(now)
        if isinstance(event, StepDone | StepFailed):
            self._said = None
        return super().handle(event, now)

    def _next_step(self, now: float) -> list[Action]:
        if self._open:
            self._open = False
            actions = super()._next_step(now)
            return actions if self._flights else [*actions, self._begin([], now)]
        work = bool(self._batching.running or self._batching.waiting)
        if self._said is None or (work and not self._said):
            self._said = work
            return [EnterBarrier(work)]
        return []
