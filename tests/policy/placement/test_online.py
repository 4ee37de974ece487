"""When a placement is solved from live routing, and whether it is worth its moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.policy.placement.solvers.test_link_aware import QUICK, pairs_of_topics, two_level

from moesaic.cluster.solving.job import Job, answer, read
from moesaic.core.placement import Placement
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.policy.placement.online import Forecast, SolveRule, Traffic, judge
from moesaic.policy.placement.online_solution import SHARE, Fleet, solve
from moesaic.policy.placement.solvers import link_aware
from moesaic.policy.placement.solvers.align import match_numbers

GIB = 1 << 30
QUIET = Forecast(local=0.5, remote_bytes=0.0, critical=20.0, balancedness=0.5)
TRAFFIC = Traffic(tokens_per_second=100.0, busy=0.4, link=GIB, copies=GIB, horizon=300.0)


def test_worked_example() -> None:
    verdict = judge(QUIET, replace(QUIET, critical=15.0), 7, 8 * GIB, TRAFFIC)
    assert verdict.gain == pytest.approx(30.0) and verdict.cost == pytest.approx(8.0)
    assert not verdict.reason


def test_locality_counts_by_tokens_and_link() -> None:
    """100 tokens/s save 1 MiB each for 300 s: 29.3 GiB at 1 GiB/s."""
    before = replace(QUIET, remote_bytes=2**21)
    verdict = judge(before, replace(before, remote_bytes=2**20), 7, 8 * GIB, TRAFFIC)
    assert verdict.gain == pytest.approx(300 * 100 / 1024) and not verdict.reason
    idle = judge(
        before, replace(before, remote_bytes=2**20), 7, 8 * GIB, replace(TRAFFIC, tokens_per_second=0)
    )
    assert idle.gain == 0 and "a gain of 0 s in 300 s is not more than 2 times the 8 s" in idle.reason
    worse = judge(
        QUIET, replace(QUIET, critical=25.0, remote_bytes=2**22), 7, 8 * GIB, replace(TRAFFIC, horizon=0)
    )
    assert "a gain of 0 s in 0 s" in worse.reason


def test_what_is_worse_in_one_way_has_to_be_better_in_the_other() -> None:
    after = replace(QUIET, critical=25.0, remote_bytes=-(2**20))
    verdict = judge(QUIET, after, 7, 0, TRAFFIC)
    assert verdict.gain == pytest.approx(300 * 100 / 1024 - 0.25 * 0.4 * 300) and verdict.reason


def test_nothing_is_swapped_for_no_move() -> None:
    verdict = judge(QUIET, replace(QUIET, critical=1.0), 0, 0, TRAFFIC)
    assert verdict.reason == "the solver found the same placement"


def test_a_solve_needs_time_and_requests() -> None:
    rule = SolveRule(60.0, now=0.0)
    assert not rule.due(59.0, 99, 99999), "too early"
    assert not rule.due(60.0, 3, 2000) and not rule.due(60.0, 20, 100), "too little"
    assert rule.due(70.0, 20, 2000)
    assert not rule.due(129.0, 20, 2000) and rule.due(130.0, 20, 2000)


def test_ranks_are_numbered_so_that_most_experts_stay() -> None:
    before = np.zeros((2, 1, 4), dtype=bool)
    before[0, 0, :2] = before[1, 0, 2:] = True
    assert match_numbers(np.array([[1, 1, 0, 0]]), before).tolist() == [1, 0]


# ---- a whole solve

E, LAYERS, V = 8, (1, 2), 40


def profile(requests: int = 60) -> Profile:
    """Requests of two kinds. Kind 0 chooses odd experts, kind 1 even ones."""
    rng = np.random.default_rng(0)
    length = 10
    kinds = np.repeat(np.arange(requests) % 2, length)
    tokens = (2 * rng.integers(0, V // 2, len(kinds)) + kinds).astype(np.int32)
    first = rng.integers(0, E // 2, (len(kinds), len(LAYERS), 1)) * 2
    experts = np.concatenate([first, (first + 2) % E], axis=2) + 1 - kinds[:, None, None]
    starts = np.arange(requests + 1, dtype=np.int64) * length
    topics = np.full(requests, NO_TOPIC, dtype=np.int16)
    routes = Routes(tokens, starts, np.full(requests, length), topics, experts.astype(np.int16))
    return replace(Profile.from_routes("moe-1", V, E, LAYERS, routes), hidden=16)


def present(servers: tuple[int, int] = (0, 1)) -> Placement:
    """Experts 0 to 3 on one server, 4 to 7 on the other: half of each request's choices are local."""
    low, high = servers
    held = {layer: {low: [0, 1, 2, 3], high: [4, 5, 6, 7]} for layer in LAYERS}
    return Placement(7, E, held, "moe-1")


@pytest.mark.parametrize("servers", [(0, 1), (4, 2)])
def test_a_solve_finds_the_kinds_of_requests(servers: tuple[int, int]) -> None:
    fleet = Fleet(servers, dict.fromkeys(servers, 1.0))
    found = solve(profile(), present(servers), None, fleet, "sem-moe")
    assert found.old_forecast.local == pytest.approx(0.5, abs=0.05)
    assert (
        found.new_forecast.local > 0.9 and found.new_forecast.remote_bytes < found.old_forecast.remote_bytes
    )
    assert found.homes.servers == tuple(sorted(servers)) and found.homes.is_complete
    assert found.homes.version == 8 and found.placement.experts_by_layer == found.homes.experts_by_layer
    by_rank = [set(found.homes.experts_of(server, 1)) for server in servers]
    assert sorted(map(sorted, by_rank)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert (found.tables.experts[0] == [1 if e in by_rank[1] else 0 for e in range(E)]).all()


def test_after_a_swap_the_same_routing_is_not_worth_a_move() -> None:
    fleet = Fleet((0, 1), {0: 1.0, 1: 1.0})
    once = solve(profile(), present(), None, fleet, "sem-moe")
    again = solve(profile(), once.placement, once.tables, fleet, "sem-moe")
    assert again.placement.experts_by_layer == once.placement.experts_by_layer
    assert again.old_forecast.local == pytest.approx(again.new_forecast.local)


def test_copies_and_servers_that_joined_are_kept() -> None:
    fleet = Fleet((0, 1), {0: 1.0, 1: 1.0, 5: 1.0}, redundant=2, min_replicas=2)
    found = solve(profile(), present(), None, fleet, "sem-moe")
    assert all(found.placement.replicas(layer).min() >= 2 for layer in LAYERS)
    assert found.placement.servers == (0, 1, 5) and found.homes.servers == (0, 1)


def test_a_placement_that_only_numbers_ranks_otherwise_moves_nothing() -> None:
    fleet = Fleet((0, 1), {0: 1.0, 1: 1.0})
    once = solve(profile(), present(), None, fleet, "sem-moe").homes
    held = {layer: {0: once.experts_of(1, layer), 1: once.experts_of(0, layer)} for layer in LAYERS}
    other = Placement(7, E, held, "moe-1")
    assert (
        solve(profile(), other, None, fleet, "sem-moe").placement.experts_by_layer == other.experts_by_layer
    )


def test_a_small_gain_does_not_pay_for_many_bytes() -> None:
    """12 s of gain and 8 s of cost: not with a margin of 2, but with one of 1."""
    after = replace(QUIET, critical=18.0)
    assert judge(QUIET, after, 7, 8 * GIB, TRAFFIC).reason
    assert not judge(QUIET, after, 7, 8 * GIB, replace(TRAFFIC, margin=1.0)).reason


# ---- links


def test_each_links_own_seconds_replace_the_assumed_speed() -> None:
    """2 ms of a token's 5 ms on the links are saved, for 100 tokens/s in 300 s."""
    before = replace(QUIET, remote_bytes=2**20, link_seconds=5e-3)
    verdict = judge(before, replace(before, link_seconds=3e-3), 7, 0, TRAFFIC)
    assert verdict.gain == pytest.approx(60.0)


def test_a_solve_prices_the_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks 0 and 1 share a host, and so do 2 and 3. A copy of the job in files gives the same answer."""
    monkeypatch.setattr(link_aware, "AnnealingSearch", lambda: QUICK)
    found, _ = pairs_of_topics(1)
    found = replace(found, hidden=16)
    held = {layer: {rank: [rank, rank + 4] for rank in range(4)} for layer in found.layers}
    present = Placement(0, 8, held, found.model)
    prices = tuple(map(tuple, two_level([0, 0, 1, 1]).tolist()))
    blind = Fleet((0, 1, 2, 3), dict.fromkeys(range(4), 1.0))
    fleet = replace(blind, prices=prices)
    solution = solve(found, present, None, fleet, "vanilla")
    assert solution.old_forecast.link_seconds is not None
    assert solution.new_forecast.link_seconds is not None
    assert solution.new_forecast.link_seconds < solution.old_forecast.link_seconds
    assert solve(found, present, None, blind, "vanilla").new_forecast.link_seconds is None
    Job(found, present, None, fleet, "vanilla").save(tmp_path)
    answer(tmp_path)
    assert read(tmp_path).placement == solution.placement


def test_seconds_of_links_are_those_of_a_loop() -> None:
    found, prices = replace(profile(), hidden=16), two_level([0, 1])
    fleet = Fleet((0, 1), {0: 1.0, 1: 1.0}, prices=tuple(map(tuple, prices.tolist())))
    solution = solve(found, present(), None, fleet, "sem-moe")
    _, held_out = found.routes.split(SHARE, 0)
    total = 0.0
    for token, owner in enumerate(held_out.owners.tolist()):
        for layer in range(len(LAYERS)):
            servers = held_out.experts[token, layer] // 4
            total += sum(float(prices[owner % 2, server]) * 2 * 16 * 4 for server in servers.tolist())
    assert solution.old_forecast.link_seconds == pytest.approx(total / len(held_out.tokens))
