from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.tokens import IntArray
from moesaic.policy.placement.packing import (
    BoolArray,
    FloatArray,
    Layer,
    copies,
    keep_copies,
    pack,
    server_slots,
    swap,
)


def floats(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float64)


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def nothing(experts: int, servers: int) -> BoolArray:
    return np.zeros((experts, servers), dtype=np.bool_)


def test_server_slots_worked_example() -> None:
    found = server_slots(8, 8, floats(1, 1, 1), np.zeros((4, 3), dtype=np.int64))
    assert found.tolist() == [[3, 3, 2], [3, 2, 3], [2, 3, 3], [3, 3, 2]]


def test_who_can_hold_no_more_leaves_its_share_to_the_others() -> None:
    assert server_slots(12, 8, floats(8, 1, 1), ints(0, 0, 0)[None]).tolist() == [[8, 2, 2]]


def test_the_odd_slot_stays_where_it_is() -> None:
    """The shares are 3.5 and 1.5. The second placement repeats the decision of the first one."""
    first = server_slots(5, 5, floats(7, 3), ints(0, 5)[None])
    assert first.tolist() == [[3, 2]]
    assert server_slots(5, 5, floats(7, 3), first).tolist() == [[3, 2]]
    assert server_slots(5, 5, floats(7, 3), ints(5, 0)[None]).tolist() == [[4, 1]]


@pytest.mark.slow
@given(st.integers(1, 30), st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5), st.data())
def test_totals_are_fair_over_the_layers(experts: int, weights: list[float], data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, experts * len(weights)))
    found = server_slots(slots, experts, np.array(weights), np.zeros((12, len(weights)), dtype=np.int64))
    assert (found.sum(axis=1) == slots).all() and found.max() <= experts
    assert (np.ptp(found, axis=0) <= 1).all()
    for one, other in itertools.combinations(range(len(weights)), 2):
        if weights[one] == weights[other]:
            assert abs(found[:, one].sum() - found[:, other].sum()) <= 1


def test_copies_worked_example() -> None:
    assert copies(floats(8, 4, 2, 2), ints(3, 3), 1).tolist() == [2, 2, 1, 1]


def test_copies_leave_a_place_for_each_expert() -> None:
    """Only two of the three servers have room for more than one expert."""
    assert copies(floats(90, 1, 1, 1), ints(4, 3, 0), 1).tolist() == [2, 2, 2, 1]
    assert copies(floats(90, 1, 1, 1), ints(4, 1, 1), 1).tolist() == [3, 1, 1, 1]


def test_an_expert_makes_way_for_those_that_need_the_server() -> None:
    """Expert 0 prefers server 1, but expert 1 needs both servers."""
    layer = Layer(floats(5, 1), ints(1, 2), ints(2, 1), floats(1, 10))
    assert pack(layer, nothing(2, 2)).tolist() == [[True, False], [True, True]]


def test_new_copies_leave_room_for_those_that_stay() -> None:
    """Server 0 is ten times as large, but one of its two slots is expert 2's."""
    layer = Layer(floats(4, 3, 1, 1), ints(1, 1, 1, 1), ints(2, 2), floats(10, 1))
    staying = nothing(4, 2)
    staying[2, 0] = staying[3, 1] = True
    assert np.argmax(pack(layer, staying), axis=1).tolist() == [0, 1, 0, 1]


def test_kept_worked_example() -> None:
    layer = Layer(floats(6, 3, 1), ints(1, 1, 1), ints(3, 0), floats(1, 1))
    before = np.array([[True, False]] * 3)
    assert keep_copies(layer, before, limit=7.0)[:, 0].tolist() == [True, False, True]
    assert keep_copies(layer, before, limit=10.0)[:, 0].tolist() == [True, True, True]
    assert keep_copies(layer, before, limit=2.0)[:, 0].tolist() == [False, False, True]


def test_surplus_copies_leave_the_busiest_server() -> None:
    layer = Layer(floats(2, 1), ints(1, 1), ints(1, 1), floats(1, 1))
    assert keep_copies(layer, np.array([[True, True], [True, False]]), limit=9.0).tolist() == [
        [False, True],
        [True, False],
    ]


def test_swap_worked_example() -> None:
    layer = Layer(floats(5, 4, 3, 2), ints(1, 1, 1, 1), ints(2, 2), floats(1, 1))
    held = np.array([[True, False], [True, False], [False, True], [False, True]])
    assert np.flatnonzero(swap(layer, held, 0.0)[:, 0]).tolist() == [1, 2]
    assert (swap(layer, held, 9.0) == held).all()


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, BoolArray]:
    """Strategy for layers whose slots and copies match, with any holders before."""
    experts, servers = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    room = draw(st.lists(st.integers(0, experts), min_size=servers, max_size=servers))
    least = draw(st.integers(1, servers))
    if sum(room) < experts * least:
        room, least = [experts] * servers, 1
    each = draw(st.lists(st.integers(0, 20), min_size=experts, max_size=experts))
    count = copies(np.array(each, dtype=np.float64), np.array(room), least)
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=servers, max_size=servers))
    cells = draw(st.lists(st.booleans(), min_size=experts * servers, max_size=experts * servers))
    before = np.array(cells).reshape(experts, servers)
    return Layer(each / count, count, np.array(room), np.array(capacity)), before


@given(layers(), st.floats(0.1, 50))
def test_every_room_is_filled_and_every_copy_placed(problem: tuple[Layer, BoolArray], limit: float) -> None:
    layer, before = problem
    staying = keep_copies(layer, before, limit)
    assert not (staying & ~before).any()
    assert (staying.sum(axis=1) <= layer.count).all() and (staying.sum(axis=0) <= layer.room).all()
    assert (layer.load_per_copy @ staying <= limit * layer.capacity).all()
    held = pack(layer, staying)
    exchanged = swap(layer, held, 0.0)
    for found in (held, exchanged):
        assert found.sum(axis=1).tolist() == layer.count.tolist()
        assert found.sum(axis=0).tolist() == layer.room.tolist()
    peak, later = ((layer.load_per_copy @ found / layer.capacity).max() for found in (held, exchanged))
    assert later <= peak


@pytest.mark.slow
@given(layers())
def test_no_expert_could_have_had_the_copy_of_another(problem: tuple[Layer, BoolArray]) -> None:
    """For all numbers of copies: if a cold expert got a copy, no hotter expert could have taken it."""
    layer, _ = problem
    load = layer.load_per_copy * layer.count
    for hot, cold in itertools.permutations(range(len(load)), 2):
        wished = layer.count.copy()
        wished[hot], wished[cold] = wished[hot] + 1, wished[cold] - 1
        gave = load[cold] / max(wished[cold], 1)
        if wished[cold] >= layer.count.min() and gave < layer.load_per_copy[hot] * (1 - 1e-9):
            assert not matches(wished, layer.room)


def matches(count: IntArray, room: IntArray) -> bool:
    """Whether the copies fit the slots. It is enough to try each expert on its servers with the most room."""
    left = sorted(room.tolist(), reverse=True)
    for copies_of_one in sorted(count.tolist(), reverse=True):
        if copies_of_one > len(left) or (copies_of_one and left[copies_of_one - 1] == 0):
            return False
        left = sorted([n - (i < copies_of_one) for i, n in enumerate(left)], reverse=True)
    return not any(left)
