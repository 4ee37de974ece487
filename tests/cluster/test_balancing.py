"""Experts move, and servers come and go, by what they have to do; the bits stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moesaic.cluster.autoscaling import Autoscaling, Sample, autoscale_rules
from moesaic.cluster.balancing import Balancing
from moesaic.cluster.loads import INTERVALS, Loads
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertServerStats
from moesaic.policy.fleet.autoscale import AutoscaleRule
from moesaic.policy.placement import around_homes, balance
from moesaic.policy.placement.spreading import exposed
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
        assert not loads.has_full_window() or second == 11
        loads.tick(float(second), [0])
    assert loads.has_full_window() and loads.window().tolist() == [[0, 0]]
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
    assert placement.experts_by_layer[0] == {0: (0, 1), 1: (2, 3)}
    balancing = Balancing(LAYOUT, EVEN, 0.0)
    now = filled(balancing, SKEWED, share=0.5)
    assert balancing.plan_rebalance(now - 1.0, placement, EQUAL) is None, "too early"
    new = balancing.plan_rebalance(now, placement, EQUAL)
    assert new is not None and new.version == 1
    assert sorted(map(set, new.experts_by_layer[0].values()), key=min)[0] & {0, 1} != {0, 1}, (
        "the hot ones part"
    )
    assert new.experts_by_layer[1] == placement.experts_by_layer[1]
    assert balancing.plan_rebalance(now + 1.0, placement, EQUAL) is None, "once an interval"


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
    assert balancing.plan_rebalance(filled(balancing, load, share), placement, EQUAL) is None


def test_copies_on_one_host_are_a_reason_to_move() -> None:
    """Whatever the load, and what the moves cost."""
    servers, hosts = dict.fromkeys(range(4), 1.0), {0: "a", 1: "a", 2: "b", 3: "b"}
    blind = balance.place(np.ones((2, 4)), (0, 1), servers, min_replicas=2)
    assert exposed(blind, range(4), hosts) > 0
    settings = ClusterConfig(expert_servers=4, min_replicas=2, rebalance_interval=10.0)
    balancing = Balancing(LAYOUT, settings, 0.0)
    now = filled(balancing, [[25] * 4] * 2, share=0.0)
    for new in (
        balancing.plan_spread(blind, servers, hosts),
        balancing.plan_rebalance(now, blind, servers, 1, hosts),
    ):
        assert new is not None and exposed(new, range(4), hosts) == 0
        assert balancing.plan_spread(new, servers, hosts) is None
    assert balancing.plan_spread(blind, servers, dict.fromkeys(hosts, "a")) is None
    one_copy = ClusterConfig(expert_servers=4, placement="f")
    assert Balancing(LAYOUT, one_copy, 0.0, blind).plan_spread(blind, servers, hosts) is None, (
        "a file's copies stay"
    )


def test_copies_beside_a_file_are_spread_too() -> None:
    servers, hosts = dict.fromkeys(range(4), 1.0), {0: "a", 1: "a", 2: "b", 3: "b"}
    homes = balance.place(np.ones((2, 4)), (0, 1), servers)
    blind = around_homes.place(homes, np.array([[8, 1, 7, 1]] * 2), (0, 1), servers, min_replicas=2)
    assert exposed(blind, range(4), hosts) > 0
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=4, placement="f", min_replicas=2), 0.0, homes)
    new = balancing.plan_spread(blind, servers, hosts)
    assert new is not None and exposed(new, range(4), hosts) == 0
    assert all(
        set(homes.server_experts(server)[0]) <= set(new.server_experts(server)[0]) for server in servers
    )


def test_an_interval_of_zero_is_never() -> None:
    placement = balance.place(np.ones((2, 4)), (0, 1), {0: 1.0, 1: 1.0})
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, rebalance_interval=0.0), 0.0)
    assert balancing.plan_rebalance(1e9, placement, EQUAL) is None


def test_autoscaling_looks_once_a_second_at_how_busy_servers_were_since() -> None:
    settings = ClusterConfig(expert_servers=2, autoscale="1:4")
    balancing = Balancing(LAYOUT, settings, 0.0)
    wanted = []
    for second in range(1, 9):
        spent = {(0, 1): 0.95 * second, (1, 1): 0.9 * second}
        assert balancing.count_needed_servers(second - 0.5, 0, spent, 2) == 2, "between two looks"
        wanted.append(balancing.count_needed_servers(float(second), 0, spent, 2))
    assert wanted[:6] == [2, 2, 2, 2, 2, 3], "high for five seconds"


def test_a_missed_objective_is_a_reason_for_more_servers() -> None:
    """Misses that go on for five seconds; those of before do not count again."""
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, autoscale="1:4"), 0.0)
    wanted = [
        balancing.count_needed_servers(float(second), 0, {(0, 1): 0.0}, 2, second) for second in range(1, 8)
    ]
    assert wanted[:6] == [2, 2, 2, 2, 2, 3]
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=2, autoscale="1:4"), 0.0)
    missed = [2, 4, 6, 6, 8, 8, 9, 9]
    wanted = [
        balancing.count_needed_servers(float(second), 0, {(0, 1): 0.5 * second}, 2, count)
        for second, count in enumerate(missed, start=1)
    ]
    assert wanted == [2] * len(missed)


def test_a_restarted_server_counts_from_zero() -> None:
    balancing = Balancing(LAYOUT, ClusterConfig(expert_servers=1, autoscale="1:4"), 0.0)
    for second in range(1, 20):
        assert balancing.count_needed_servers(float(second), 0, {(0, second): 0.5}, 1) == 1


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


RANKS = ClusterConfig(data_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("settings", "text", "found"),
    [
        (ClusterConfig(expert_servers=2), "1:4", {"expert-servers": (1, 4)}),
        (ClusterConfig(attention_workers=2), "attention-workers=1:3", {"attention-workers": (1, 3)}),
        (
            ClusterConfig(expert_servers=2),
            "attention-workers=1:3, expert-servers=2:2",
            {"attention-workers": (1, 3), "expert-servers": (2, 2)},
        ),
        (RANKS, "1:4", {"ranks": (1, 4)}),
        (RANKS, "ranks=2:4", {"ranks": (2, 4)}),
    ],
)
def test_limits_of_each_role(settings: ClusterConfig, text: str, found: dict[str, tuple[int, int]]) -> None:
    rules = autoscale_rules(replace(settings, autoscale=text).resolve())
    assert {role: (rule.least, rule.most) for role, rule in rules.items()} == found


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        (ClusterConfig(expert_servers=2), "ranks=1:4", "allowed: expert-servers, attention-workers, prefill"),
        (ClusterConfig(expert_servers=2), "routers=1:4", "allowed: expert-servers or attention-workers or"),
        (ClusterConfig(expert_servers=2), "1:2,expert-servers=1:2", "each once, with =MIN:MAX"),
        (ClusterConfig(), "1:4", "--expert-servers: got 0; allowed: at least 1 with --autoscale"),
        (ClusterConfig(), "prefill-workers=1:4", "--prefill-workers: got 0; allowed: 1 to 4"),
        (ClusterConfig(), "attention-workers=2:4", "--attention-workers: got 1; allowed: 2 to 4"),
        (RANKS, "expert-servers=1:4", "--enable-expert-parallel, whose workers and servers are pairs"),
        (RANKS, "ranks=1:4,attention-workers=1:4", "MIN:MAX or ranks=MIN:MAX"),
        (RANKS, "3:4", "--attention-workers: got 2; allowed: 3 to 4 with --autoscale 3:4"),
    ],
)
def test_limits_that_the_cluster_cannot_have(settings: ClusterConfig, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        autoscale_rules(replace(settings, autoscale=text).resolve())


def decided(
    settings: ClusterConfig,
    seconds: int,
    busy: float,
    occupied: float,
    prefill: float = 0.5,
    waiting: int = 0,
) -> dict[str, int]:
    """The first numbers that are wanted within so many seconds, where everything stays as it is."""
    settings = settings.resolve()
    scaling = Autoscaling(settings, 0.0)
    processes = {
        "expert_servers": settings.expert_servers,
        "attention_workers": settings.attention_workers,
        "prefill_workers": settings.prefill_workers,
    }
    for second in range(1, seconds):
        times = {"expert_servers": {(0, 1): busy * second}, "prefill_workers": {(0, 1): prefill * second}}
        sample = Sample(processes, {"prefill_workers": waiting}, busy=times, occupancy=occupied)
        if found := scaling.decide_counts(float(second), sample):
            return found
    return {}


def test_each_role_scales_by_its_own_load() -> None:
    both = ClusterConfig(
        expert_servers=2, attention_workers=2, autoscale="attention-workers=1:4,expert-servers=1:4"
    )
    assert decided(both, 9, busy=0.9, occupied=0.5) == {"expert_servers": 3}
    assert decided(both, 9, busy=0.5, occupied=0.95) == {"attention_workers": 3}
    assert decided(both, 9, busy=0.5, occupied=0.5) == {}
    assert decided(both, 200, busy=0.1, occupied=0.5) == {"expert_servers": 1}
    assert decided(both, 200, busy=0.5, occupied=0.1) == {"attention_workers": 1}


def test_prefill_workers_scale_by_the_time_for_which_they_have_prompts() -> None:
    roles = "attention-workers=1:4,prefill-workers=1:4"
    both = ClusterConfig(attention_workers=2, prefill_workers=2, autoscale=roles)
    assert decided(both, 9, busy=0.0, occupied=0.5, prefill=0.95) == {"prefill_workers": 3}
    assert decided(both, 9, busy=0.0, occupied=0.95) == {"attention_workers": 3}
    assert decided(both, 200, busy=0.0, occupied=0.5, prefill=0.1) == {"prefill_workers": 1}
    assert decided(both, 9, busy=0.0, occupied=0.5, waiting=20) == {"prefill_workers": 4}
    beside = replace(RANKS, prefill_workers=2, autoscale="ranks=1:4,prefill-workers=1:4")
    assert decided(beside, 9, busy=0.5, occupied=0.5, prefill=0.95) == {"prefill_workers": 3}
    alone = replace(beside, autoscale="prefill-workers=1:4")
    assert decided(alone, 9, busy=0.95, occupied=0.95, prefill=0.95) == {"prefill_workers": 3}


def test_ranks_scale_as_pairs_by_the_busier_half() -> None:
    ranks = replace(RANKS, autoscale="1:4")
    more = {"attention_workers": 3, "expert_servers": 3}
    assert decided(ranks, 9, busy=0.95, occupied=0.1) == decided(ranks, 9, busy=0.1, occupied=0.95) == more
    assert decided(ranks, 200, busy=0.1, occupied=0.5) == {}
    assert decided(ranks, 200, busy=0.1, occupied=0.1) == {"attention_workers": 1, "expert_servers": 1}


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
        assert before is not None and after is not None and after.experts_by_layer != before.experts_by_layer
        report = served.supervisor.report()
        assert served.broken_off == 0 and all(layer.least > 0 for layer in report.replicas)
        assert {member.experts for member in report.processes[1:]} == {
            sum(len(ids) for ids in after.server_experts(server).values()) for server in after.servers
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "settings", "autoscale"),
    [
        ("prefill worker", {"expert_servers": 0, "prefill_workers": 1}, "prefill-workers=1:2"),
        ("expert server", {"expert_servers": 1}, "1:2"),
        ("attention worker", {"expert_servers": 0}, "attention-workers=1:2"),
        (
            "expert server",
            {"expert_servers": 0, "data_parallel_size": 1, "enable_expert_parallel": True},
            "ranks=1:2",
        ),
    ],
    ids=["prefill", "servers", "workers", "ranks"],
)
def test_autoscaling_adds_and_removes_processes_of_a_real_cluster(
    role: str,
    settings: dict[str, Any],
    autoscale: str,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = AutoscaleRule(1, 2, high=0.02, low=0.01, queue=2, up_seconds=0, down_seconds=0.5, cooldown=0.5)
    monkeypatch.setattr("moesaic.cluster.autoscaling.SECONDS", 0.3)
    monkeypatch.setattr(AutoscaleRule, "parse", lambda text: quick)

    def serving() -> int:
        found = served.supervisor.status()
        return sum(one.role == role and one.stage == "serving" for one in found)

    with cluster(**settings, autoscale=autoscale, rebalance_interval=0.0) as served:
        while serving() < 2:
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda: len(served.running.unfinished) < COUNT)
        answers = served.finish()
        assert answers == expected * (len(answers) // COUNT)
        served.until(lambda: serving() == 1 and served.supervisor.report().change is None)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish()[-COUNT:] == expected
        assert served.broken_off == 0
