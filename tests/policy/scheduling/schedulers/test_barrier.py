"""The scheduler of synchronous expert parallelism, with a gate that the test opens."""

from __future__ import annotations

from tests.support.fake_executor import FakeExecutor
from tests.support.scheduler_replay import replays
from tests.support.toy_model import request

from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    BarrierPassed,
    EnterBarrier,
    Event,
    RunStep,
    StepPlan,
)
from moesaic.policy.scheduling.schedulers.barrier import BarrierScheduler

LIMITS = BatchLimits(3, 6, 16)


class Worker(FakeExecutor):
    """One of several workers. At the gate it says whether it has work."""

    def __init__(self) -> None:
        super().__init__(LIMITS, 8, 2)
        self.scheduler = BarrierScheduler(LIMITS, self.blocks)
        self.said: list[bool] = []
        """What this worker said at the gate since the gate last opened."""

    def tell(self, event: Event) -> list[Action]:
        self.now += 0.5
        actions = self.scheduler.handle(event, self.now)
        self.log.append((event, self.now, actions))
        for action in actions:
            if isinstance(action, EnterBarrier):
                self.said.append(action.work)
            else:
                self._carry_out(action)
        return actions

    def enter(self) -> list[Action]:
        """Every worker arrives at the gate."""
        self.said = []
        return self.tell(BarrierPassed())

    def begun(self) -> list[int] | None:
        """The ids of the requests whose rows are in the current step, or None if there is no step."""
        return None if self.under_way is None else self.under_way.request_ids.tolist()

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.batch.num_rows:
            super()._check_plan(plan)


def test_no_step_begins_before_the_gate_opens_and_each_needs_it_anew() -> None:
    subject = Worker()
    subject.arrive(request(0, [1, 2], max_tokens=2))
    assert subject.said == [True] and subject.begun() is None
    subject.enter()
    assert subject.begun() == [0]
    subject.step()
    assert subject.said == [True] and subject.begun() is None


def test_a_worker_without_work_takes_part_with_no_rows() -> None:
    subject = Worker()
    subject.arrive(request(0, [1, 2], max_tokens=1))
    subject.enter()
    subject.step()
    assert subject.said == [False]
    [action] = subject.enter()
    assert isinstance(action, RunStep) and action.plan.batch.num_rows == 0
    subject.step()
    assert subject.said == [False]
    subject.arrive(request(1, [3], max_tokens=1))
    assert subject.said == [False, True], "the gate hears that there is work now"


def test_replay_gives_the_same_actions() -> None:
    """The run has arrivals, preemptions, cancellations, a step that broke off, and steps without rows."""
    subject = Worker()
    subject.arrive(*(request(i, [i % 2] * (i + 1), max_tokens=7) for i in range(6)))
    for turn in range(40):
        subject.enter()
        if turn == 1:
            subject.cancel(1, 5)
        if turn == 3:
            subject.fail()
        else:
            subject.step()
    subject.check_everybody()
    said = [action for _, _, actions in subject.log for action in actions if isinstance(action, EnterBarrier)]
    assert EnterBarrier(True) in said and EnterBarrier(False) in said and subject.preempted > 0
    assert replays(BarrierScheduler(LIMITS, KVBlocks(8, 2)), subject.log)
    assert not replays(BarrierScheduler(LIMITS, KVBlocks(9, 2)), subject.log)
