"""A recorded run of the real engine, fed to the simulation, makes the same decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support import replayed_server
from tests.support.recorded_cluster import Journal, Recorded, RecordedService, record
from tests.support.replayed_worker import Replay, begun
from tests.support.scheduler_replay import equal
from tests.support.small_scenario import EXPERTS, TOP_K, cluster

from moesaic.config import SchedulerConfig
from moesaic.planning.sim.scenario import ScheduleTable
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import make_policy
from moesaic.policy.scheduling.minimum_batch import Decisions
from moesaic.policy.scheduling.schedulers.actions import Action, Admit, PartsArrived, Scheduler
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.barrier import BarrierScheduler
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.runtime import in_memory


def scheduler(found: Recorded, schedule: str, inflight: int) -> Scheduler:
    """A fresh scheduler with the settings of the recorded one."""
    blocks, layout = KVBlocks(found.num_blocks, 16, True), found.layout
    if schedule == "lockstep":
        return LockstepScheduler(found.limits, blocks, inflight)
    if schedule == "barrier":
        return BarrierScheduler(found.limits, blocks)
    policy = make_policy("defrag", 0.1)
    return AsyncScheduler(found.limits, blocks, policy, len(layout.layers), layout.top_k, found.gather)


def without_times(journal: Journal) -> list[tuple[Any, list[Action]]]:
    """Events and actions. Seconds in queues differ in the last digits, since sums of times are rounded."""

    def plain(action: Action) -> Action:
        if not isinstance(action, Admit):
            return action
        return replace(action, queue_seconds=[round(seconds, 5) for seconds in action.queue_seconds])

    return [(event, [plain(action) for action in actions]) for event, _, actions in journal]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("async", {}),
        ("async", {"combine": "partial"}),
        ("lockstep", {}),
        ("lockstep", {"inflight_batches": 2}),
        ("barrier", {}),
    ],
)
def test_a_recorded_run_makes_the_same_decisions(schedule: str, settings: dict[str, Any]) -> None:
    rule = EnoughPairs(1 << 62, 1.0) if schedule == "barrier" else EnoughPairs(1)
    found = record(schedule, rule, **settings)
    fresh = scheduler(found, schedule, settings.get("inflight_batches", 1))
    layout = found.layout
    replayed = Replay(fresh, found.journal, len(layout.layers), layout.top_k).run()
    assert begun(replayed) == begun(found.journal) > 10
    real, simulated = without_times(found.journal), without_times(replayed)
    for index, (one, other) in enumerate(zip(real, simulated, strict=False)):
        assert equal(one, other), f"entry {index}: recorded {one}, simulated {other}"
    assert len(real) == len(simulated)
    if schedule == "async":
        assert sum(isinstance(event, PartsArrived) for event, _ in real) > 50
    for service in found.services:
        again = RecordedService(service._layers, make_policy("defrag"), rule)
        runs = [run for *_, run in replayed_server.turns(service.log) if run is not None]
        assert equal(replayed_server.replay(service, again, layout.num_experts), runs)
        assert len(runs) > 40


def test_workers_have_the_defaults_of_serve() -> None:
    simulated = cluster(schedule={"kind": "async"})
    assert simulated.scenario.schedule.queue_urgency == in_memory.URGENT_SECONDS
    assert simulated._decisions == Decisions(simulated.devices.curves, EXPERTS, TOP_K, 2, 2)
    assert ScheduleTable().queue_policy == SchedulerConfig.queue_policy
