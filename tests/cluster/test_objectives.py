"""Tokens that come too late are counted where they pass, and cause more servers."""

from __future__ import annotations

import pytest

from moesaic import SamplingParams
from moesaic.cluster.objectives import Objectives
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError
from moesaic.core.request import FinishReason, Request
from moesaic.policy.fleet.autoscale import AutoscaleRule
from moesaic.transport.local import local_pair
from tests.cluster.test_identity import workload
from tests.support.cluster_driver import cluster
from tests.transport.test_conformance import INFO


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_worked_example() -> None:
    """The example of `Objectives`."""
    clock = Clock()
    subject = Objectives(1.0, 0.1, clock)
    last = None
    for clock.now in (6.5, 6.55, 7.0):
        last = subject.record_token(5.0, last)
    assert (subject.missed_ttft, subject.missed_itl, subject.total_misses) == (1, 1, 2)


def test_without_a_limit_nothing_is_missed() -> None:
    clock = Clock()
    first, later, none = Objectives(1.0, None, clock), Objectives(None, 0.1, clock), Objectives(clock=clock)
    for subject in (first, later, none):
        last = None
        for clock.now in (10.0, 20.0, 20.05):
            last = subject.record_token(0.0, last)
    assert [(one.missed_ttft, one.missed_itl) for one in (first, later, none)] == [(1, 0), (0, 1), (0, 0)]


def test_the_flags_are_milliseconds() -> None:
    clock = Clock()
    subject = Objectives.from_config(ClusterConfig(expert_servers=1, slo_ttft=500, slo_itl=50.0), clock)
    last = None
    for clock.now in (0.4, 0.44, 0.5):
        last = subject.record_token(0.0, last)
    assert (subject.missed_ttft, subject.missed_itl) == (0, 1)
    clock.now = 0.6
    subject.record_token(0.0, None)
    assert subject.missed_ttft == 1


def tokens(finish: FinishReason | None, *request_ids: int) -> messages.Tokens:
    return messages.Tokens(list(request_ids), [9] * len(request_ids), [finish] * len(request_ids))


def test_the_router_counts_each_request_of_its_own() -> None:
    """A worker's death is no excuse: the token that comes from the next one is late."""
    router, clock = Router(), Clock()
    router.objectives = Objectives(1.0, 0.1, clock)
    for worker in (0, 1):
        router.join(worker, local_pair()[0], INFO)
    params = SamplingParams(max_tokens=4)
    router.send(messages.Submit([Request(1, [5], params, arrival=0.0), Request(2, [5], params, arrival=2.0)]))
    workers = {number: entry.worker for number, entry in router._entries.items()}
    assert set(workers.values()) == {0, 1}
    clock.now = 2.5
    for number, at in workers.items():
        assert at is not None
        router.take(at, tokens(None, number))
    assert (router.objectives.missed_ttft, router.objectives.missed_itl) == (1, 0)
    assert workers[1] is not None
    router.leave(workers[1])
    clock.now = 2.7
    assert workers[2] is not None
    router.take(workers[2], tokens(FinishReason.LENGTH, 1, 2))
    router.take(workers[2], tokens(None, 1))  # it has ended
    assert (router.objectives.missed_ttft, router.objectives.missed_itl) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"expert_servers": 1, "slo_ttft": 0.0}, "--slo-ttft: got 0.0; allowed: milliseconds, more than 0"),
        ({"expert_servers": 1, "slo_itl": -1.0}, "--slo-itl: got -1.0"),
        ({"expert_servers": 1, "slo_itl": float("nan")}, "--slo-itl: got nan"),
        (
            {"slo_itl": 5.0},
            "--attention-workers: got 1; allowed: at least 2, or expert servers, with --slo-itl",
        ),
    ],
)
def test_what_cannot_be_an_objective(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ClusterConfig(**settings)  # type: ignore[arg-type]
    assert str(raised.value).startswith(named)


@pytest.mark.slow
def test_missed_objectives_bring_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token comes within a microsecond; nothing else asks for more servers."""
    monkeypatch.setattr("moesaic.cluster.autoscaling.SECONDS", 0.05)
    rule = AutoscaleRule(1, 2, high=1.0, queue=1e6, up_seconds=0.5)
    monkeypatch.setattr(AutoscaleRule, "parse", lambda text: rule)
    with cluster(expert_servers=1, autoscale="1:2", slo_itl=0.001) as served:
        for _ in range(100):
            served.submit(*workload(2, 64))
            served.finish()
            if len(served.supervisor.status()) == 3:
                break
        report = served.supervisor.report()
        assert len(report.processes) == 3
        assert report.counters.missed_itl > 0 == report.counters.missed_ttft
