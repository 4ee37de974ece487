"""Prefill workers come and go while they serve: no request fails or moves, every bit stays."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from dataclasses import replace

import pytest

from moesaic.cluster import launcher
from moesaic.cluster.local import ChildProcess
from moesaic.cluster.member import RestartRule
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, ScalingError
from tests.cluster.test_identity import alone
from tests.cluster.test_prefill import nothing_is_left, prefill_cluster, workload
from tests.support import pairs
from tests.support.cluster_driver import PATIENCE, Cluster, cluster

COUNT = len(workload()[0])
SCHEDULES = ("lockstep", "async", "barrier")


def prefill_workers(served: Cluster) -> list[str]:
    """Those that serve."""
    status = served.supervisor.status()
    return [one.name for one in status if one.role == "prefill worker" and one.stage == "serving"]


def during(served: Cluster, future: Future[None]) -> None:
    """Keeps requests coming until the change is done, then a round more."""
    while not future.done():
        if len(served.running.unfinished) < COUNT:
            served.submit(*workload(24))
        served.take(0.05)
    future.result()
    served.submit(*workload(24))


@pytest.mark.parametrize("schedule", pairs.some(SCHEDULES, SCHEDULES[1:2]))
def test_prefill_workers_come_and_go_during_traffic(schedule: str) -> None:
    """One that leaves first ends its prompts and the transfers that are under way."""
    with prefill_cluster(expert_servers=1, schedule=schedule) as served:
        changes = served.supervisor._changes.changes
        changes._limits = replace(changes._limits, draining=PATIENCE)  # however busy the machine is
        for number in (3, 1, 0, 2):
            during(served, served.supervisor.scale(prefill_workers=number))
            assert len(prefill_workers(served)) == number
        answers = served.finish()
        assert answers == alone(*workload(24)) * (len(answers) // COUNT)
        nothing_is_left(served)
        report = served.supervisor.report()
        found = report.counters.moved_requests, report.counters.process_deaths, served.broken_off
        assert found == (0, 0, 0), report.failures
        assert served.stats.transfers.failed_transfers == 0


@pytest.mark.slow
def test_one_that_cannot_be_started_is_named_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = launcher.spawn_worker

    def stillborn(config: WorkerConfig) -> ChildProcess:
        process = spawn(config)
        os.kill(process.pid, signal.SIGKILL)
        return process

    with prefill_cluster(expert_servers=0) as served:
        served.submit(*workload(24))
        monkeypatch.setattr(launcher, "spawn_worker", stillborn)
        future = served.supervisor.scale(prefill_workers=2)
        served.until(future.done)
        with pytest.raises(ScalingError, match=r"prefill worker 1 did not come up: .*signal 9.*as it was"):
            future.result()
        assert served.finish() == alone(*workload(24))
        assert prefill_workers(served) == ["prefill worker 0"]
        assert "prefill worker 1 did not come up" in served.supervisor.report().failures[-1].what


@pytest.mark.slow
def test_one_that_was_given_up_is_replaced_by_command() -> None:
    with prefill_cluster(expert_servers=0) as served:
        served.supervisor._rule = RestartRule(max_deaths=1)
        os.kill(served.pid("prefill worker 0"), signal.SIGKILL)
        served.until(lambda: served.supervisor.status()[-1].stage == "stopped")
        future = served.supervisor.scale(prefill_workers=1)
        served.until(future.done)
        future.result()
        assert [one.name for one in served.supervisor.status()] == ["attention worker 0", "prefill worker 1"]
        served.submit(*workload())
        assert served.finish() == alone(*workload())
        served.until(lambda: served.stats.transfers.received_requests == 6)


@pytest.mark.slow
def test_numbers_that_cannot_be_are_refused() -> None:
    with prefill_cluster(expert_servers=0, autoscale="prefill-workers=1:2") as served:
        for number, error, message in (
            (-1, ConfigError, "prefill_workers: got -1; allowed: at least 0"),
            (3, ScalingError, "prefill_workers: got 3; --autoscale allows 1 to 2"),
            (0, ScalingError, "prefill_workers: got 0; --autoscale allows 1 to 2"),
        ):
            with pytest.raises(error, match=message):
                served.supervisor.scale(prefill_workers=number).result(60)
    with (
        cluster(expert_servers=0, attention_workers=2) as served,
        pytest.raises(ScalingError, match="start with --prefill-workers") as refused,
    ):
        served.supervisor.scale(prefill_workers=1).result(60)
    assert refused.value.conflict
