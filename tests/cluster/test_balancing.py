"""Experts move, and servers come and go, by what they have to do; the bits stay."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cluster.balancing import Balancing
from moesaic.cluster.loads import INTERVALS, Loads
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertServerStats
from moesaic.policy.fleet.autoscale import AutoscaleRule
from moesaic.policy.placement import balance
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 6, 48
LAYOUT = ExpertLayout({0: "a", 1: "b"}, "g", "u", "d", 64, 32, 4, 2, "bfloat16")


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


def busy(seconds: float) -> ExpertServerStats:
    return ExpertServerStats(busy_seconds=seconds)


# ---- loads


def test_counts_go_on_when_a_process_is_replaced() -> None:
    loads = Loads(1, 2, seconds=10.0)
    loads.add_report(0, 1, busy(1.0), [[5, 0]])
    loads.add_report(0, 1, busy(2.0), [])
    loads.add_report(0, 1, busy(3.0), [[8, 1]])
    loads.add_report(0, 2, busy(0.5), [[2, 0]])
    loads.add_report(1, 1, busy(0.0), [[0, 4]])
    assert loads.total.tolist() == [[10, 5]]


def test_the_window_slides_and_forgets_who_left() -> None:
    loads = Loads(1, 2, seconds=10.0)
    loads.tick(0.0, [0, 1])
    loads.add_report(0, 1, busy(0.5), [[6, 0]])
    loads.add_report(1, 1, busy(0.0), [[0, 2]])
    loads.tick(1.0, [0, 1])
    assert loads.window().tolist() == [[6, 2]]
    assert loads.balancedness().tolist() == [pytest.approx(4 / 6)]
    assert loads.utilisation() == 0.25, "busy half a second and not at all, of one second"
    loads.tick(2.0, [0])
    assert loads.window().tolist() == [[6, 0]]
    for second in range(3, 12):
        assert not loads.full() or second == 11
        loads.tick(float(second), [0])
    assert loads.full() and loads.window().tolist() == [[0, 0]]
    assert loads.total.tolist() == [[6, 2]]


def test_a_report_of_another_shape_is_not_counted() -> None:
    loads = Loads(1, 2, seconds=10.0)
    loads.add_report(0, 1, busy(0.0), [[1, 2, 3]])
    assert loads.total.tolist() == [[0, 0]]


# ---- decisions


def filled(balancing: Balancing, load: list[list[int]], share: float) -> float:
    """Reports of two servers that did `load` together in one window, busy for `share` of it."""
    interval = balancing._cluster.rebalance_interval / INTERVALS
    balancing.loads.tick(0.0, [0, 1])
    for step in range(1, INTERVALS + 1):
        for server in (0, 1):
            half = (np.array(load) * step).tolist()
            balancing.loads.add_report(server, 1, busy(step * interval * share), half)
        balancing.loads.tick(step * interval, [0, 1])
    return balancing._cluster.rebalance_interval


EVEN = ClusterConfig(expert_servers=2, rebalance_interval=10.0)
EQUAL = {0: 1.0, 1: 1.0}
SKEWED = [[90, 90, 5, 5], [25, 25, 25, 25]]


def test_a_skewed_load_moves_experts_once_an_interval() -> None:
    placement = balance.place(np.ones((2, 4)), (0, 1), {0: 1.0, 1: 1.0})
    assert placement.held[0] == {0: (0, 1), 1: (2, 3)}
    balancing = Balancing(LAYOUT, EVEN, 0.0)
    now = filled(balancing, SKEWED, share=0.5)
    assert balancing.rebalanced(now - 1.0, placement, EQUAL) is None, "too early"
    new = balancing.rebalanced(now, placement, EQUAL)
    assert new is not None and new.version == 1
    assert sorted(map(set, new.held[0].values()), key=min)[0] & {0, 1} != {0, 1}, "the hot ones part"
    assert new.held[1] == placement.held[1]
    assert balancing.rebalanced(now + 1.0, placement, EQUAL) is None, "once an interval"


@pytest.mark.parametrize(
    ("settings", "load", "share"),
    [
        pytest.param(EVEN, [[25] * 4] * 2, 0.5, id="even"),
        pytest.param(EVEN, SKEWED, 0.0, id="idle"),
        pytest.param(
            ClusterConfig(expert_servers=2, rebalance_interval=10.0, placement="f"), SKEWED, 0.5, id="file"
        ),
    ],
)
def test_nothing_moves_without_a_reason(settings: ClusterConfig, load: list[list[int]], share: float) -> None:
    placement = balance.place(np.ones((2, 4)), (0, 1), {0: 1.0, 1: 1.0})
    balancing = Balancing(LAYOUT, settings, 0.0)
    assert balancing.rebalanced(filled(balancing, load, share), placement, EQUAL) is None


def test_an_interval_of_zero_is_never() -> None:
    placement = balance.place(np.ones((2, 4)), (0, 1), {0: 1.0, 1: 1.0})
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, rebalance_interval=0.0), 0.0)
    assert balancing.rebalanced(1e9, placement, EQUAL) is None


def test_autoscaling_looks_once_a_second_at_how_busy_servers_were_since() -> None:
    settings = ClusterConfig(expert_servers=2, autoscale="1:4")
    balancing = Balancing(LAYOUT, settings, 0.0)
    wanted = []
    for second in range(1, 9):
        spent = {(0, 1): 0.95 * second, (1, 1): 0.9 * second}
        assert balancing.wanted_servers(second - 0.5, 0, spent, 2) == 2, "between two looks"
        wanted.append(balancing.wanted_servers(float(second), 0, spent, 2))
    assert wanted[:6] == [2, 2, 2, 2, 2, 3], "high for five seconds"


def test_a_missed_objective_is_a_reason_for_more_servers() -> None:
    """Misses that go on for five seconds; those of before do not count again."""
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, autoscale="1:4"), 0.0)
    wanted = [balancing.wanted_servers(float(second), 0, {(0, 1): 0.0}, 2, second) for second in range(1, 8)]
    assert wanted[:6] == [2, 2, 2, 2, 2, 3]
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, autoscale="1:4"), 0.0)
    missed = [2, 4, 6, 6, 8, 8, 9, 9]
    wanted = [
        balancing.wanted_servers(float(second), 0, {(0, 1): 0.5 * second}, 2, count)
        for second, count in enumerate(missed, start=1)
    ]
    assert wanted == [2] * len(missed)


def test_a_restarted_server_counts_from_zero() -> None:
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=1, autoscale="1:4"), 0.0)
    for second in range(1, 20):
        assert balancing.wanted_servers(float(second), 0, {(0, second): 0.5}, 1) == 1


@pytest.mark.parametrize(
    ("text", "message"), [("3", "MIN:MAX"), ("4:2", "MIN:MAX"), ("1:4", "at least --min-replicas, 2")]
)
def test_bounds_that_make_no_sense_are_refused_at_the_start(text: str, message: str) -> None:
    settings = ClusterConfig(expert_servers=2, min_replicas=2, autoscale=text)
    with pytest.raises(ConfigError, match=f"--autoscale: got '{text}'; allowed: .*{message}"):
        Balancing(LAYOUT, settings, 0.0)


@pytest.mark.parametrize("servers", [1, 5])
def test_a_start_out_of_bounds_is_refused(servers: int) -> None:
    settings = ClusterConfig(expert_servers=servers, autoscale="2:4")
    with pytest.raises(
        ConfigError, match=f"--expert-servers: got {servers}; allowed: 2 to 4 with --autoscale 2:4"
    ):
        Balancing(LAYOUT, settings, 0.0)


def test_pairs_do_not_scale_by_themselves() -> None:
    settings = ClusterConfig(data_parallel_size=2, enable_expert_parallel=True, autoscale="1:4").resolved()
    with pytest.raises(
        ConfigError, match="--autoscale: got '1:4'; allowed: None with --enable-expert-parallel"
    ):
        Balancing(LAYOUT, settings, 0.0)


# ---- real processes


def moved(served: Cluster) -> bool:
    report = served.supervisor.report()
    return report.counters.rebalances > 0 and report.change is None


@pytest.mark.slow
def test_a_skewed_load_moves_experts_during_traffic(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.balancing.HORIZON", 10**6)  # tiny experts: any gain is worth it
    with cluster(expert_servers=2, redundant_experts=4, rebalance_interval=1.0) as served:
        before = served.supervisor.placement
        while not moved(served):
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: not served.running.unfinished)
            assert len(served.running.answers) < 100 * COUNT, "no expert moved"
        served.submit(*workload(COUNT, TOKENS))
        answers = served.finish()
        assert answers == expected * (len(answers) // COUNT)
        after = served.supervisor.placement
        assert before is not None and after is not None and after.held != before.held
        report = served.supervisor.report()
        assert served.broken_off == 0 and all(layer.least > 0 for layer in report.replicas)
        assert {member.experts for member in report.processes[1:]} == {
            sum(len(ids) for ids in after.of(server).values()) for server in after.servers
        }


@pytest.mark.slow
def test_autoscaling_adds_and_removes_servers_of_a_real_cluster(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = AutoscaleRule(1, 2, high=0.02, low=0.01, queue=2, up_seconds=0, down_seconds=0.5, cooldown=0.5)
    monkeypatch.setattr("moesaic.cluster.balancing.AUTOSCALE_SECONDS", 0.3)
    monkeypatch.setattr(AutoscaleRule, "parse", lambda text: quick)

    def servers() -> int:
        found = served.supervisor.status()
        return sum(one.role == "expert server" and one.stage == "serving" for one in found)

    with cluster(expert_servers=1, autoscale="1:2", rebalance_interval=0.0) as served:
        while servers() < 2:
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: len(served.running.unfinished) < COUNT)
        answers = served.finish()
        assert answers == expected * (len(answers) // COUNT)
        served.until(lambda: servers() == 1 and served.supervisor.report().change is None)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish()[-COUNT:] == expected
        assert served.broken_off == 0
