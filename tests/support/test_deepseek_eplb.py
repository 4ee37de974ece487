from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from tests.support.deepseek_eplb import FloatArray, Replication, _pack, _replicate, eplb

PUBLISHED = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=np.float64,
)


def obvious(load: list[float], slots: int, groups: int, nodes: int, gpus: int) -> list[int]:
    """One layer's experts by slot, one item after the other."""
    if groups % nodes:
        groups = nodes = 1
    size = len(load) // groups
    found: list[int] = []
    for packed in lightest([sum(load[g * size : g * size + size]) for g in range(groups)], nodes):
        mine = [group * size + i for group in packed for i in range(size)]
        copies = list(mine)
        while len(copies) < slots // nodes:
            copies.append(max(mine, key=lambda e: load[e] / copies.count(e)))
        for gpu in lightest([load[e] / copies.count(e) for e in copies], gpus // nodes):
            found += [copies[slot] for slot in gpu]
    return found


def lightest(items: list[float], packs: int) -> list[list[int]]:
    if len(items) == packs:
        return [[i] for i in range(packs)]
    found: list[list[int]] = [[] for _ in range(packs)]
    for item in sorted(range(len(items)), key=lambda i: -items[i]):
        room = [pack for pack in found if len(pack) < len(items) // packs]
        min(room, key=lambda pack: sum(items[i] for i in pack)).append(item)
    return found


def test_published_vector() -> None:
    """The example of DeepSeek's repository: 12 experts in 4 groups, 16 slots, 2 nodes, 8 GPUs."""
    found = eplb(PUBLISHED, slots=16, groups=4, nodes=2, gpus=8)
    assert found.phys_to_log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert found.copies[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert found.log_to_phys.shape == (2, 12, 2)
    assert found.log_to_phys[0, [5, 0]].tolist() == [[0, 2], [12, -1]]
    assert_consistent(found, 16)


def test_worked_example() -> None:
    found = eplb(np.array([[90.0, 10.0]]), slots=4, groups=1, nodes=1, gpus=2)
    assert found.phys_to_log.tolist() == [[0, 0, 0, 1]]
    assert found.log_to_phys.tolist() == [[[0, 2, 1], [3, -1, -1]]]
    assert found.copies.tolist() == [[3, 1]]


def test_packing_worked_example() -> None:
    pack, seat = _pack(np.array([[5.0, 1, 3, 2]]), 2)
    assert pack.tolist() == [[0, 0, 1, 1]] and seat.tolist() == [[0, 1, 0, 1]]


def test_replication_worked_example() -> None:
    expert, copy, count = _replicate(np.array([[9.0, 4.0]]), 4)
    assert expert.tolist() == [[0, 1, 0, 0]]
    assert copy.tolist() == [[0, 0, 1, 2]]
    assert count.tolist() == [[3, 1]]


def assert_consistent(found: Replication, slots: int) -> None:
    for layer, experts in enumerate(found.phys_to_log):
        assert np.bincount(experts, minlength=found.copies.shape[1]).tolist() == found.copies[layer].tolist()
        for expert, count in enumerate(found.copies[layer]):
            mine = found.log_to_phys[layer, expert]
            assert set(mine[:count]) == set(np.flatnonzero(experts == expert))
            assert (mine[count:] == -1).all()
        assert len(experts) == slots


def test_groups_that_do_not_divide_by_nodes_are_not_kept_together() -> None:
    found = eplb(PUBLISHED, slots=16, groups=5, nodes=3, gpus=8)
    assert found.phys_to_log.tolist() == eplb(PUBLISHED, 16, 1, 1, 8).phys_to_log.tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloatArray, int, int, int, int]:
    nodes, groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    gpus, experts = nodes * draw(st.integers(1, 3)), groups * size
    slots = gpus * draw(st.integers(-(-experts // gpus), -(-experts // gpus) + 3))
    row = st.lists(st.integers(0, 50), min_size=experts, max_size=experts)
    load = draw(st.lists(row, min_size=1, max_size=3))
    return np.array(load, dtype=np.float64), slots, groups, nodes, gpus


@given(problems())
def test_the_obvious_form_gives_the_same(problem: tuple[FloatArray, int, int, int, int]) -> None:
    load, slots, groups, nodes, gpus = problem
    found = eplb(*problem)
    expected = [obvious(row, slots, groups, nodes, gpus) for row in load.tolist()]
    assert found.phys_to_log.tolist() == expected
    assert_consistent(found, slots)


@pytest.mark.parametrize(
    ("slots", "groups", "nodes", "gpus", "message"),
    [
        (11, 4, 2, 8, "slots: got 11; allowed: a multiple of 8 GPUs, 12 experts or more"),
        (8, 4, 2, 8, "slots: got 8; "),
        (16, 8, 2, 8, "groups: got 8; allowed: a divisor of 12 experts"),
        (16, 3, 3, 8, "gpus: got 8; allowed: a multiple of 3 nodes"),
        (16, 4, 0, 8, "nodes: got 0; allowed: at least 1"),
        (16, 4, 2, 0, "gpus: got 0; allowed: at least 1"),
    ],
)
def test_what_does_not_divide_is_named(slots: int, groups: int, nodes: int, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        eplb(PUBLISHED, slots, groups, nodes, gpus)
