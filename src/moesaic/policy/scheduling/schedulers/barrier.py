"""The scheduler of synchronous expert parallelism. It is the baseline that today's engines use.

All attention workers go through a step together. At the experts of every layer each worker waits for all
others. A server computes when every worker's rows for that layer have arrived (an all-to-all), and then
answers all of them (another one). A worker without requests takes part with no rows, because the others would
wait for it otherwise.
"""

from __future__ import annotations

from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.prompt_rows import PromptRows
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    BarrierPassed,
    EnterBarrier,
    Event,
    StepDone,
    StepFailed,
)
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.schedulers.step_plan import keep_prefixes
from moesaic.policy.scheduling.speculation import Speculation


class BarrierScheduler(LockstepScheduler):
    """A lockstep scheduler that begins each step at a barrier.

    The barrier opens when every worker has arrived and at least one of them has work.
    """

    def __init__(
        self,
        limits: BatchLimits,
        blocks: KVBlocks,
        speculation: Speculation | None = None,
        prompt_rows: PromptRows | None = None,
    ) -> None:
        super().__init__(limits, blocks, speculation=speculation, prompt_rows=prompt_rows)
        self._open = False
        self._reported_work: bool | None = None
        """The value of `work` that this worker reported at the barrier of this step. None before it arrived.
        """

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, BarrierPassed):
            self._open = True
            actions = self._next_steps(now)
            return keep_prefixes(self._blocks) + actions
        if isinstance(event, StepDone | StepFailed):
            self._reported_work = None
        return super().handle(event, now)

    def _next_step(self, now: float) -> list[Action]:
        if self._open:
            self._open = False
            actions = super()._next_step(now)
            return actions if self._flights else [*actions, self._begin([], now)]
        work = bool(self._batching.running or self._batching.waiting)
        if self._reported_work is None or (work and not self._reported_work):
            self._reported_work = work
            return [EnterBarrier(work)]
        return []
