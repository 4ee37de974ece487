"""A new supervisor's first placement, by what the servers have in memory."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.policy.placement import balance, returning
from moesaic.policy.placement.spreading import exposed

LAYERS = range(3)
EVEN = {0: 1.0, 1: 1.0, 2: 1.0}


def kept(placement: Placement, names: dict[int, int]) -> dict[int, dict[int, tuple[int, ...]]]:
    """What the servers have in memory when they come back. names: new number -> the old one."""
    return {new: placement.server_experts(old) for new, old in names.items()}


def test_worked_example() -> None:
    found = returning.place({0: {0: [2, 3]}, 1: {0: [1]}}, [0], 4, {0: 1.0, 1: 1.0}, model="m")
    assert found == Placement(0, 4, {0: {0: (2, 3), 1: (0, 1)}}, "m")
    assert returning.missing(found, {0: {0: [2, 3]}, 1: {0: [1]}}) == 1


def test_servers_with_nothing_get_what_an_ordinary_start_gives_them() -> None:
    ordinary = balance.place(np.ones((3, 8)), LAYERS, EVEN, min_replicas=2)
    assert returning.place({0: {}, 1: {}}, LAYERS, 8, EVEN, min_replicas=2) == ordinary


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("rules", [(0, 1), (0, 2), (5, 1), (9, 2)])
def test_the_same_servers_in_any_order_load_nothing(order: tuple[int, ...], rules: tuple[int, int]) -> None:
    """Neither the shares of capacities nor copies of hot experts change."""
    load = np.random.default_rng(3).dirichlet([0.3] * 8, size=3) * 100
    sizes = {0: 1.0, 1: 2.0, 2: 1.5}
    before = balance.place(load, LAYERS, sizes, *rules)
    there = kept(before, dict(enumerate(order)))
    capacities = {new: sizes[old] for new, old in enumerate(order)}
    found = returning.place(there, LAYERS, 8, capacities, *rules)
    assert returning.missing(found, there) == 0
    assert {new: found.server_experts(new) for new in sizes} == there


def test_a_lost_servers_experts_alone_are_loaded() -> None:
    before = balance.place(np.ones((3, 12)), LAYERS, EVEN)
    there = kept(before, {0: 2, 1: 0})
    found = returning.place(there, LAYERS, 12, {0: 1.0, 1: 1.0})
    assert returning.missing(found, there) == 3 * 4 and found.is_complete
    assert [len(found.experts_of(server, 0)) for server in (0, 1)] == [6, 6]


def test_two_copies_are_on_two_hosts_whatever_is_in_memory() -> None:
    four, hosts = dict.fromkeys(range(4), 1.0), {0: "a", 1: "a", 2: "b", 3: "b"}
    there = {0: {0: range(4)}, 1: {0: range(4)}, 2: {0: range(4, 8)}, 3: {0: range(4, 8)}}
    found = returning.place(there, [0], 8, four, min_replicas=2, hosts=hosts)
    assert exposed(found, list(four), hosts) == 0
    assert returning.missing(found, there) == 8, "four copies of each host go to the other one"


def test_what_a_server_says_of_experts_that_do_not_exist_is_ignored() -> None:
    there = {0: {0: [0, -1, 4, 0], 7: [1]}, 5: {0: [1]}}
    found = returning.place(there, [0], 4, {0: 1.0, 1: 1.0})
    assert found.experts_by_layer[0][0][0] == 0 and found.is_complete and found.servers == (0, 1)


def test_fewer_servers_than_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="--min-replicas: got 3"):
        returning.place({0: {0: [0]}}, [0], 4, {0: 1.0, 1: 1.0}, min_replicas=3)


def test_a_server_that_joins_a_cluster_that_serves_gets_what_it_has() -> None:
    """Without it the placement would give the newcomer other experts."""
    before = balance.place(np.ones((1, 6)), [0], {0: 1.0, 1: 1.0})
    assert before.experts_by_layer == {0: {0: (0, 1, 2), 1: (3, 4, 5)}}
    close = returning.joined_by(before, {2: {0: [2, 5]}}, {0: 1.0, 1: 1.0, 2: 1.0})
    found = balance.place(np.ones((1, 6)), [0], EVEN, previous=close)
    assert found.experts_by_layer == {0: {0: (0, 1), 1: (3, 4), 2: (2, 5)}}
    assert found.version > before.version


@given(st.data())
def test_whatever_is_in_memory_the_rules_hold(data: st.DataObject) -> None:
    experts, count = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 5))
    some = st.lists(st.integers(-1, experts), max_size=experts)
    there = {server: {0: data.draw(some), 1: data.draw(some)} for server in range(count)}
    capacities = {server: data.draw(st.sampled_from([0.5, 1.0, 4.0])) for server in range(count)}
    least, redundant = data.draw(st.integers(1, count)), data.draw(st.integers(0, 6))
    found = returning.place(there, [0, 1], experts, capacities, redundant, least)
    slots = min(max(experts + redundant, experts * least), experts * count)
    for layer in (0, 1):
        assert found.replicas(layer).min() >= least and found.replicas(layer).sum() == slots
