"""The nodes on which processes start, and threads that fit there."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.fleet.nodes import choose_nodes, has_room, no_room, threads_that_fit


@pytest.mark.parametrize(
    ("alike", "beside", "lost", "expected"),
    [
        ("", None, "", "abc"),
        ("aab", None, "", "c"),
        ("abc", None, "", "abc"),
        ("aabc", None, "", "bc"),
        ("aab", "a", "", "a"),
        ("aab", "d", "", "c"),
        ("aab", "a", "a", "c"),
        ("ab", None, "c", "ab"),
        ("", None, "abc", ""),
    ],
)
def test_a_pair_stays_together_and_copies_are_spread(
    alike: str, beside: str | None, lost: str, expected: str
) -> None:
    assert choose_nodes("abc", alike, beside, lost) == set(expected)


def test_processes_that_are_placed_one_after_the_other_are_even() -> None:
    placed: list[str] = []
    for _ in range(8):
        placed.append(min(choose_nodes("abc", placed)))
    assert sorted(placed.count(node) for node in "abc") == [2, 3, 3]


def test_what_a_node_lacks_is_said() -> None:
    nodes = [{"CPU": 4.0, "memory": 9.0}, {"CPU": 8.0, "GPU": 1.0}]
    needed = {"CPU": 2.0, "GPU": 1.0}
    assert [has_room(node, needed) for node in nodes] == [False, True]
    why = no_room(needed, {"CPU": 3.5}, nodes)
    assert why == "no node has 2 CPU and 1 GPU free; 2 nodes have 3.5 of 12 CPU, 0 of 1 GPU free"


@pytest.mark.parametrize(
    ("cpus", "processes", "threads"),
    [((16, 16, 16), 4, 8), ((16, 16, 16), 3, 16), ((4,), 4, 1), ((4,), 5, 1), ((), 2, 1), ((6.9, 2), 4, 2)],
)
def test_threads(cpus: tuple[float, ...], processes: int, threads: int) -> None:
    assert threads_that_fit(cpus, processes) == threads


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 6))
def test_threads_fit_and_one_more_would_not(cpus: list[int], processes: int) -> None:
    """Beside all ways to give the processes nodes."""

    def fit(threads: int) -> bool:
        ways = itertools.product(range(len(cpus)), repeat=processes)
        return any(all(way.count(node) * threads <= cpus[node] for node in range(len(cpus))) for way in ways)

    found = threads_that_fit(cpus, processes)
    assert not fit(found + 1)
    assert fit(found) or found == 1
