from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.deepseek_eplb import eplb
from tests.support.test_deepseek_eplb import PUBLISHED

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.balance import (
    LoadWindow,
    Move,
    balancedness,
    busiest_bytes,
    critical_load,
    gain,
    gain_seconds,
    max_over_median,
    moves,
    place,
    server_loads,
    worth_moving,
)
from moesaic.policy.placement.packing import FloatArray, Layer, copies, pack, swap


def equal(*servers: int) -> dict[int, float]:
    return dict.fromkeys(servers, 1.0)


def ints(*rows: list[int]) -> IntArray:
    return np.array(rows, dtype=np.int64)


def peaks(load: FloatArray, placement: Placement, servers: dict[int, float]) -> FloatArray:
    """The largest load / capacity of each layer, [L]."""
    capacity = np.array(list(servers.values()))
    found: FloatArray = (server_loads(load, placement, list(servers)) / capacity).max(axis=1)
    return found


# ---- place, by example


def test_worked_example() -> None:
    load = ints([8, 4, 2, 2])
    placement = place(load, [0], equal(0, 1), redundant=2)
    assert placement.experts_by_layer == {0: {0: (0, 1, 3), 1: (0, 1, 2)}}
    assert server_loads(load, placement, [0, 1]).tolist() == [[8.0, 8.0]]


@pytest.mark.parametrize("load", [np.ones((2, 8)), np.zeros((2, 8))])
def test_even_load_gives_consecutive_ranges(load: FloatArray) -> None:
    assert place(load, [1, 3], equal(4, 5, 6, 9)) == Placement.from_stages([1, 3], 8, [(4, 5, 6, 9)])


def test_odd_slots_go_round_over_the_layers() -> None:
    placement = place(np.ones((3, 8)), [0, 1, 2], equal(0, 1, 2))
    sizes = [[len(placement.experts_of(server, layer)) for server in (0, 1, 2)] for layer in (0, 1, 2)]
    assert sizes == [[3, 3, 2], [3, 2, 3], [2, 3, 3]]


def test_two_replicas_need_no_other_flag() -> None:
    placement = place(np.ones((1, 4)), [0], equal(0, 1, 2), min_replicas=2)
    assert placement.replicas(0).tolist() == [2, 2, 2, 2]
    more = place(ints([9, 1, 1, 1]), [0], equal(0, 1, 2), redundant=5, min_replicas=2)
    assert more.replicas(0).tolist() == [3, 2, 2, 2]  # nine slots: the ninth follows load


def test_redundant_slots_end_where_everybody_holds_everything() -> None:
    placement = place(np.ones((1, 3)), [0], equal(0, 1), redundant=50)
    assert placement.experts_by_layer == {0: {0: (0, 1, 2), 1: (0, 1, 2)}}


def test_a_layer_without_load_counts_as_evenly_loaded() -> None:
    placement = place(np.zeros((1, 4)), [0], equal(0, 1, 2, 3), redundant=4)
    assert placement.replicas(0).tolist() == [2, 2, 2, 2]


def test_heaviest_first_is_not_the_end() -> None:
    """The servers have 3 and 2 slots. In order, the copies make 3 + 2 + 2 and 3 + 2. After an exchange they
    make 2 + 2 + 2 and 3 + 3."""
    load = ints([3, 3, 2, 2, 2])
    placement = place(load, [0], equal(0, 1))
    assert server_loads(load, placement, [0, 1]).tolist() == [[6.0, 6.0]]


def test_a_promise_of_replicas_is_kept_though_the_slots_are_the_same() -> None:
    first = place(ints([9, 1]), [0], equal(0, 1, 2), redundant=2)
    assert first.replicas(0).tolist() == [3, 1]
    second = place(ints([9, 1]), [0], equal(0, 1, 2), 2, min_replicas=2, previous=first, slack=9.0)
    assert second.replicas(0).tolist() == [2, 2]


def test_capacity_is_a_share_of_slots_and_load() -> None:
    load = np.ones((1, 12))
    placement = place(load, [0], {0: 1.0, 1: 2.0, 2: 3.0})
    assert server_loads(load, placement, [0, 1, 2]).tolist() == [[2.0, 4.0, 6.0]]


def test_a_large_server_holds_everything_once_and_leaves_the_rest() -> None:
    placement = place(np.ones((1, 8)), [0], {0: 8.0, 1: 1.0, 2: 1.0}, redundant=4)
    assert [len(placement.experts_of(server, 0)) for server in (0, 1, 2)] == [8, 2, 2]


def test_more_servers_than_experts() -> None:
    placement = place(np.ones((1, 2)), [0], equal(0, 1, 2, 3))
    assert placement.is_complete and len(placement.servers) == 2


def test_as_even_as_eplb_on_its_example() -> None:
    found = eplb(PUBLISHED, 16, 1, 1, 4)
    each = np.take_along_axis(PUBLISHED / found.copies, found.phys_to_log, axis=1)
    theirs = balancedness(each.reshape(2, 4, 4).sum(axis=2))
    placement = place(PUBLISHED, [0, 1], equal(0, 1, 2, 3), redundant=4)
    ours = balancedness(server_loads(PUBLISHED, placement, [0, 1, 2, 3]))
    assert (ours >= theirs).all() and (ours > 0.97).all()


def test_the_fingerprint_is_carried_along() -> None:
    first = place(np.ones((1, 4)), [0], equal(0, 1), model="m")
    second = place(np.ones((1, 4)), [0], equal(0, 1, 2), previous=first)
    assert (first.model, first.version) == ("m", 0)
    assert (second.model, second.version) == ("m", 1)


# ---- place, staying close


SKEWED = np.random.default_rng(5).dirichlet([1.0] * 32, size=6) * 1000.0
LAYERS = range(6)


def test_nothing_moves_while_the_load_stays() -> None:
    first = place(SKEWED, LAYERS, equal(0, 1, 2, 3), redundant=8)
    assert place(SKEWED, LAYERS, equal(0, 1, 2, 3), redundant=8, previous=first) is first
    assert place(SKEWED * 3, LAYERS, equal(0, 1, 2, 3), redundant=8, previous=first, slack=0.0) is first


def test_a_death_moves_little_more_than_what_was_lost() -> None:
    first = place(SKEWED, LAYERS, equal(0, 1, 2, 3, 4), redundant=8)
    lost = sum(map(len, first.server_experts(2).values()))
    second = place(SKEWED, LAYERS, equal(0, 1, 3, 4), redundant=8, previous=first)
    assert second.is_complete and 2 not in second.servers
    assert lost <= len(moves(first, second)) <= 1.25 * lost


def test_a_join_moves_what_the_new_server_holds() -> None:
    first = place(SKEWED, LAYERS, equal(0, 1, 2, 3), redundant=8)
    second = place(SKEWED, LAYERS, equal(0, 1, 2, 3, 9), redundant=8, previous=first)
    new = sum(map(len, second.server_experts(9).values()))
    assert new == 48
    assert new <= len(moves(first, second)) <= 1.25 * new


def test_slack_buys_fewer_moves() -> None:
    first = place(SKEWED, LAYERS, equal(0, 1, 2, 3), redundant=8)
    later = SKEWED * np.random.default_rng(6).lognormal(0.0, 0.3, SKEWED.shape)
    found = [place(later, LAYERS, equal(0, 1, 2, 3), 8, previous=first, slack=s) for s in (0.0, 0.05, 0.5)]
    counts = [len(moves(first, placement)) for placement in found]
    assert counts[0] > counts[1] > counts[2] == 0


# ---- place, for all


@dataclass(frozen=True)
class Case:
    load: FloatArray
    servers: dict[int, float]
    redundant: int
    min_replicas: int

    def place(self, previous: Placement | None = None, slack: float = 0.05) -> Placement:
        layers = range(len(self.load))
        return place(self.load, layers, self.servers, self.redundant, self.min_replicas, previous, slack)

    @property
    def slots(self) -> int:
        experts = int(self.load.shape[1])
        wanted = max(experts + self.redundant, experts * self.min_replicas)
        return min(wanted, experts * len(self.servers))


@st.composite
def cases(draw: st.DrawFn, shape: tuple[int, int] | None = None) -> Case:
    layers, experts = shape or (draw(st.integers(1, 4)), draw(st.integers(1, 12)))
    weights = st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0, 7.0])
    servers = draw(st.dictionaries(st.integers(0, 40), weights, min_size=1, max_size=6))
    cells = st.one_of(st.integers(0, 3), st.integers(0, 1000))
    rows = st.lists(cells, min_size=experts, max_size=experts)
    load = draw(st.lists(rows, min_size=layers, max_size=layers))
    redundant = draw(st.integers(0, 2 * experts))
    return Case(np.array(load, float), servers, redundant, draw(st.integers(1, min(3, len(servers)))))


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 12)).flatmap(lambda s: st.tuples(cases(s), cases(s)))
"""The same model before and after a change of load, servers and flags."""


def assert_sound(case: Case, placement: Placement) -> None:
    """Checks that every expert is held often enough and never twice by one server, and that slots follow
    capacity."""
    capacity = np.array([case.servers[server] for server in sorted(case.servers)])
    experts = case.load.shape[1]
    assert placement.layers == tuple(range(len(case.load))) and set(placement.servers) <= set(case.servers)
    for layer in placement.layers:
        count = placement.replicas(layer)
        assert count.min() >= case.min_replicas and count.sum() == case.slots
        room = np.array([len(placement.experts_of(server, layer)) for server in sorted(case.servers)])
        free = room < experts  # who holds everything can hold no more; its share goes to the others
        left = case.slots - experts * np.count_nonzero(~free)
        share = left * capacity[free] / capacity[free].sum()
        assert (np.abs(room[free] - share) < 1 + 1e-6).all()


@pytest.mark.slow
@given(cases())
def test_every_placement_is_sound(case: Case) -> None:
    placement = case.place()
    assert_sound(case, placement)
    assert case.place() == placement
    if case.min_replicas > 1:
        assert not any(placement.orphans(excluded_servers={server}) for server in case.servers)


@pytest.mark.slow
@given(PAIRS)
def test_the_next_placement_is_sound_too(pair: tuple[Case, Case]) -> None:
    first, second = pair
    before = first.place()
    after = second.place(before)
    assert_sound(second, after)
    assert second.place(before) == after and second.place(after) is after
    assert after is before or after.version == 1


@pytest.mark.slow
@given(cases())
def test_never_worse_than_consecutive_ranges(case: Case) -> None:
    """Holds without redundancy on equal servers, where the ranges are as long as the slots."""
    experts = case.load.shape[1]
    plain = Case(case.load, dict.fromkeys(case.servers, 1.0), 0, 1)
    if experts % len(plain.servers) == 0:
        ranges = Placement.from_stages(range(len(case.load)), experts, [sorted(plain.servers)])
        ours, theirs = (peaks(case.load, p, plain.servers) for p in (plain.place(), ranges))
        assert (ours <= theirs * (1 + 1e-6)).all()


@pytest.mark.slow
@given(cases())
def test_equal_servers_differ_by_one_copy_at_most(case: Case) -> None:
    """The largest load is at most the mean plus one copy. No greedy packing has a lower bound."""
    even = Case(case.load, dict.fromkeys(case.servers, 1.0), case.redundant, case.min_replicas)
    placement = even.place()
    for row, layer in zip(even.load, placement.layers, strict=True):
        each = row / placement.replicas(layer)
        loads = server_loads(
            row[None], Placement(0, len(row), {0: placement.experts_by_layer[layer]}), list(even.servers)
        )
        assert loads.max() <= loads.mean() + each.max() + 1e-6


@pytest.mark.slow
@given(PAIRS, st.sampled_from([0.0, 0.05, 0.3]))
def test_no_worse_than_from_scratch_but_for_the_slack(pair: tuple[Case, Case], slack: float) -> None:
    first, second = pair
    after = second.place(first.place(), slack)
    ids = sorted(second.servers)
    capacity = np.array([second.servers[server] for server in ids])
    found = peaks(second.load, after, second.servers)
    for row, layer in enumerate(after.layers):
        load = second.load[row]
        room = np.array([len(after.experts_of(server, layer)) for server in ids])
        count = copies(load, room, second.min_replicas)
        whole = Layer(load / count, count, room, capacity)
        scratch = swap(whole, pack(whole, np.zeros((len(load), len(ids)), dtype=np.bool_)), 0.0)
        best = (whole.each @ scratch / capacity).max()
        assert found[row] <= best * (1 + slack) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_replicas": 3}, "--min-replicas: got 3; allowed: 1 to the 2 expert servers"),
        ({"min_replicas": 0}, "--min-replicas: got 0; allowed: 1 to the 2 expert servers"),
        ({"redundant": -1}, "--redundant-experts: got -1; allowed: 0 or more"),
        ({"servers": {}}, "--expert-servers: got 0; allowed: at least 1"),
        ({"servers": {4: 0.0, 5: 1.0}}, "capacity of server 4: got 0.0; allowed: a positive number"),
        ({"load": np.array([[1.0, np.nan]])}, "load: got nan; allowed: finite numbers from 0 on"),
        ({"load": np.array([[1.0, -2.0]])}, "load: got -2.0; allowed: finite numbers from 0 on"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"load": np.ones((1, 2)), "layers": [0], "servers": equal(0, 1)}
    with pytest.raises(ConfigError, match=f"^{message}"):
        place(**settings | changes)  # type: ignore[arg-type]


def test_shapes_must_agree() -> None:
    first = place(np.ones((1, 4)), [0], equal(0))
    with pytest.raises(ValueError, match=r"load \(1, 4\) for layers \[0, 1\]"):
        place(np.ones((1, 4)), [0, 1], equal(0))
    with pytest.raises(ValueError, match="ascending"):
        place(np.ones((2, 4)), [1, 0], equal(0))
    with pytest.raises(ValueError, match="load has 5 experts, the previous placement 4"):
        place(np.ones((1, 5)), [0], equal(0), previous=first)


# ---- what a change costs and brings

OLD = Placement(0, 4, {0: {0: [0, 1], 1: [2, 3]}})
NEW = Placement(1, 4, {0: {0: [0, 2], 1: [1, 3], 5: [0]}})


def test_moves_are_the_copies_that_lack() -> None:
    assert moves(OLD, NEW) == [Move(0, 0, 5), Move(0, 1, 1), Move(0, 2, 0)]
    assert moves(OLD, OLD) == []
    assert len(moves(None, NEW)) == 5
    assert busiest_bytes(moves(OLD, NEW), expert_bytes=10) == 10
    assert busiest_bytes(moves(None, NEW), expert_bytes=10) == 20
    assert busiest_bytes([], expert_bytes=10) == 0


def test_gain_worked_example() -> None:
    """Server 0 carries 16 of 20 before. It carries 8 + 2 after a copy of expert 0 was made elsewhere."""
    load = ints([12, 4, 2, 2])
    servers = equal(0, 1, 5)
    assert server_loads(load, OLD, [0, 1, 5]).tolist() == [[16.0, 4.0, 0.0]]
    assert server_loads(load, NEW, [0, 1, 5]).tolist() == [[8.0, 6.0, 6.0]]
    assert critical_load(load, NEW, servers) == 8.0
    assert gain(load, OLD, NEW, servers) == 0.5
    assert gain(load, NEW, OLD, servers) == -1.0
    assert gain(load, OLD, NEW, {0: 2.0, 1: 1.0, 5: 1.0}) == 0.25  # 16/2 before, 6/1 after
    assert gain(load * 0, OLD, NEW, servers) == 0.0


def test_what_lost_an_expert_gains_everything() -> None:
    assert gain(ints([1, 1, 1, 1]), OLD, NEW, equal(1, 5)) == 1.0


def test_loads_of_who_is_left() -> None:
    assert server_loads(ints([12, 4, 2, 2]), NEW, [5, 1]).tolist() == [[12.0, 6.0]]


def test_worth_moving_worked_example() -> None:
    assert gain_seconds(0.25, busy=0.4, horizon=300.0) == pytest.approx(30.0)
    assert worth_moving(30.0, move_bytes=8 * 2**30, bandwidth=2.0**30)
    assert not worth_moving(16.0, move_bytes=8 * 2**30, bandwidth=2.0**30)
    assert worth_moving(16.0, move_bytes=8 * 2**30, bandwidth=2.0**30, margin=1.0)
    assert not worth_moving(0.0, move_bytes=0, bandwidth=1.0)


# ---- how even a load is


def test_balancedness_by_hand() -> None:
    load = ints([4, 4, 4], [9, 3, 0], [0, 0, 0], [5, 0, 0])
    assert balancedness(load) == pytest.approx([1.0, 4 / 9, 1.0, 1 / 3])
    assert max_over_median(load).tolist() == [1.0, 3.0, 1.0, np.inf]


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), max_size=9))
def test_a_window_sums_its_last_intervals(size: int, intervals: list[list[int]]) -> None:
    window = LoadWindow(2, 3, size)
    for end, counts in enumerate(intervals, start=1):
        window.add(np.array(counts).reshape(2, 3))
        assert len(window) == min(end, size)
        assert window.totals.ravel().tolist() == np.sum(intervals[max(0, end - size) : end], axis=0).tolist()
    if not intervals:
        assert len(window) == 0 and not window.totals.any()


def test_a_window_holds_an_interval_at_least() -> None:
    with pytest.raises(ConfigError, match="^intervals: got 0; allowed: at least 1"):
        LoadWindow(1, 1, 0)
