"""The supervisor's thread dies or hangs while requests run. Another one goes on: no token is different."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from moesaic.cluster.change_queue import ChangeQueue
from moesaic.cluster.local import ChildProcess
from moesaic.cluster.member import RestartRule
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.scaling import Changes
from moesaic.cluster.weight_check import WeightCheck
from moesaic.core.errors import ScalingError
from tests.cluster.test_failures import raising
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_supervisor import Plan, doing, failures, killing
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 4, 48
SHAPE: dict[str, Any] = {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2}


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


def once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], None]
) -> Callable[[], None]:
    """From when it is called, the next call of this method does `act` first."""
    whole: Callable[..., Any] = getattr(owner, name)
    armed: list[bool] = []

    def broken(*arguments: Any) -> Any:
        if armed:
            armed.clear()
            act()
        return whole(*arguments)

    monkeypatch.setattr(owner, name, broken)
    return lambda: armed.append(True)


def hanging() -> None:
    time.sleep(4.0)


def restarted(served: Cluster, times: int = 1) -> None:
    served.until(lambda: served.supervisor.report().counters.supervisor_restarts == times)


def serves_again(served: Cluster, incarnations: list[int]) -> None:
    served.until(lambda: [one.incarnation for one in served.supervisor.status()] == incarnations)
    served.until(lambda: {one.stage for one in served.supervisor.status()} == {"serving"})


POINTS = [(WeightCheck, "keep"), (WeightCheck, "tick"), (ChangeQueue, "advance")]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(*POINTS[0], marks=pytest.mark.slow),
        *[pytest.param(*one, marks=pytest.mark.full) for one in POINTS[1:3]],
    ],
)
def test_a_thread_that_dies_is_replaced(
    owner: type, name: str, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    die = once(monkeypatch, owner, name, raising(SystemExit("a bug")))
    with cluster(**SHAPE) as served:
        pids = [one.pid for one in served.supervisor.status()]
        served.submit(*workload(COUNT, TOKENS))
        plan = Plan((20, die), (60, lambda: restarted(served)), (80, killing(served, "expert server 0")))
        assert served.finish(plan) == expected and not plan.steps
        serves_again(served, [1, 1, 2, 1])
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((5 * TOKENS, killing(served, "attention worker 1")))) == 2 * expected
        serves_again(served, [1, 2, 2, 1])
        report = served.supervisor.report()
        assert report.watched and report.counters.supervisor_restarts == 1
        assert failures(served)[0] == "the supervisor is restarted: its thread died: SystemExit: a bug"
        assert pids[0] == report.processes[0].pid, "what lives was found again"


@pytest.mark.full
def test_what_died_while_nobody_watched_is_restarted(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a server whose end the thread was handling when it died."""
    die = once(monkeypatch, ChildProcess, "describe_end", raising(SystemExit("a bug")))
    with cluster(**SHAPE) as served:
        served.submit(*workload(COUNT, TOKENS))
        plan = Plan((20, die), (30, killing(served, "expert server 0")))
        assert served.finish(plan) == expected
        serves_again(served, [1, 1, 2, 1])
        assert served.supervisor.report().counters.supervisor_restarts == 1


@pytest.mark.slow
def test_a_thread_that_hangs_is_replaced(expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """While it handles the end of a server."""
    hang = once(monkeypatch, ChildProcess, "describe_end", hanging)
    with cluster(**SHAPE) as served:
        served.supervisor._watchdog.hung_seconds = 1.0
        served.submit(*workload(COUNT, TOKENS))
        plan = Plan((20, hang), (30, killing(served, "expert server 0")))
        assert served.finish(plan) == expected and not plan.steps
        serves_again(served, [1, 1, 2, 1])
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((5 * TOKENS, killing(served, "attention worker 0")))) == 2 * expected
        serves_again(served, [2, 1, 2, 1])
        [hung] = [what for what in failures(served) if "hangs" in what]
        assert hung.startswith(
            "the supervisor is restarted: its thread hangs in hanging (test_supervisor_res"
        )


@pytest.mark.full
@pytest.mark.parametrize("act", [raising(SystemExit("a bug")), hanging], ids=["dies", "hangs"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Publisher, "serve"), (Changes, "_join"), (Changes, "_settle"), (Changes, "_time_copies")],
)
def test_a_change_in_the_middle_of_which_a_thread_ends_is_made_again(
    owner: type, name: str, act: Callable[[], None], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = once(monkeypatch, owner, name, act)
    with cluster(**SHAPE) as served:
        served.supervisor._watchdog.hung_seconds = 1.0
        served.submit(*workload(COUNT, TOKENS))
        end()
        future = served.supervisor.scale(expert_servers=3)
        assert served.finish() == expected
        served.until(future.done)
        future.result()
        restarted(served)
        report = served.supervisor.report()
        assert sum(one.role == "expert server" for one in report.processes) == 3
        assert {one.stage for one in report.processes} == {"serving"} and report.change is None
        assert all(layer.least == 2 for layer in report.replicas)
        served.supervisor.scale(expert_servers=2).result(60)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 2 * expected


@pytest.mark.full
def test_a_change_that_waits_goes_on_in_the_next_thread(expected: list[Answer]) -> None:
    with cluster(**SHAPE) as served:
        future = served.supervisor.scale(attention_workers=3)
        served.until(lambda: served.supervisor.report().change is not None)
        doing(served, raising(SystemExit("a bug")))()
        served.until(future.done)
        future.result()
        restarted(served)
        assert [one.incarnation for one in served.supervisor.status()] == [1] * 5
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == expected


@pytest.mark.full
def test_a_supervisor_that_keeps_dying_is_given_up(expected: list[Answer]) -> None:
    with cluster(**SHAPE) as served:
        served.supervisor._watchdog.rule = RestartRule(first_delay=0.01)
        served.submit(*workload(COUNT, TOKENS))
        for _ in range(6):
            doing(served, raising(SystemExit("a bug")))()
        assert served.finish() == expected
        served.until(lambda: not served.supervisor.report().watched)
        assert served.supervisor.report().counters.supervisor_restarts == 5
        assert failures(served)[-1].startswith("the supervisor has stopped, so processes are not restarted")
        with pytest.raises(ScalingError, match="the supervisor has stopped"):
            served.supervisor.scale(expert_servers=3).result(10)
        os.kill(served.pid("expert server 0"), signal.SIGKILL)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 2 * expected
