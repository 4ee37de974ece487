"""Guesses are loaded while they are right often enough, and are judged whether they are loaded or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.offloading.prefetch import ExpertPrefetch, GuessRecord

EXPERTS = 8
CHOSEN = st.lists(st.integers(0, EXPERTS - 1), max_size=12).map(lambda ids: np.array(ids, np.int64))


def run_steps(
    prefetch: ExpertPrefetch, guesses: Sequence[int], chosen: Sequence[int], steps: int
) -> list[int]:
    """What is loaded at last, after steps in which a gate guesses and chooses the same again and again."""
    loaded: list[int] = []
    for _ in range(steps):
        loaded = prefetch.experts(0, EXPERTS, (), guesses)
        prefetch.learn(0, np.array(chosen))
    return loaded


def test_worked_example() -> None:
    """In one step expert 1 is chosen once and expert 3 twice, in the next expert 1 once. Then 1 counts 1.5
    and 3 counts 1."""
    prefetch = ExpertPrefetch(4)
    prefetch.learn(0, np.array([1, 3, 3]))
    assert prefetch.rank_recent(0) == [3, 1]
    prefetch.learn(0, np.array([1]))
    assert prefetch.rank_recent(0) == [1, 3] and prefetch.rank_recent(1) == []


def test_nothing_is_loaded_before_a_guess_was_right() -> None:
    prefetch = ExpertPrefetch(EXPERTS)
    assert run_steps(prefetch, [2, 5], [2, 5], steps=1) == []
    assert run_steps(prefetch, [2, 5], [2, 5], steps=1) == [2, 5]
    assert prefetch.experts(1, EXPERTS, (), [7]) == [7], "what was learned holds for all layers"


def test_wrong_guesses_are_no_longer_loaded_until_they_are_right_again() -> None:
    prefetch = ExpertPrefetch(EXPERTS)
    assert run_steps(prefetch, [2], [2, 5], steps=20) == [2, 5]
    assert run_steps(prefetch, [6], [0, 1], steps=60) == [0, 1], "recent choices are right, the gate is not"
    assert run_steps(prefetch, [6], [6, 1], steps=200) == [6, 1]


def test_choices_that_do_not_repeat_are_not_loaded() -> None:
    """Experts come round in turn, so the recent ones are always wrong."""
    prefetch = ExpertPrefetch(EXPERTS)
    for step in range(100):
        loaded = prefetch.experts(0, 4, ())
        prefetch.learn(0, np.array([step % EXPERTS]))
    assert loaded == []


def test_only_the_first_ranks_pay() -> None:
    record = GuessRecord(EXPERTS)
    rng = np.random.default_rng(0)
    for _ in range(400):
        guesses = [0, 1, 2, 3]
        record.learn(
            guesses, np.array([guess for guess in guesses if rng.random() < (0.9, 0.7, 0.3, 0.2)[guess]])
        )
    assert record.num_worthwhile() == 2


def test_guesses_that_are_forgotten_are_not_judged() -> None:
    prefetch = ExpertPrefetch(EXPERTS)
    run_steps(prefetch, [2], [2], steps=5)
    for _ in range(60):
        prefetch.experts(0, EXPERTS, (), [3])
        prefetch.forget_guesses()
        prefetch.learn(0, np.array([2]))
    assert prefetch.experts(1, EXPERTS, (), [3]) == [3]


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 1), CHOSEN, st.permutations(range(EXPERTS)))),
    st.integers(0, EXPERTS + 1),
    st.sets(st.integers(0, EXPERTS - 1)),
)
def test_at_most_so_many_once_each_and_none_that_is_excluded(
    steps: list[tuple[int, np.ndarray, list[int]]], most: int, excluded: set[int]
) -> None:
    prefetch = ExpertPrefetch(EXPERTS)
    for layer, chosen, guesses in steps:
        loaded = prefetch.experts(layer, most, excluded, guesses[:3])
        assert len(set(loaded)) == len(loaded) <= most and not excluded & set(loaded)
        recent = prefetch.rank_recent(layer)
        assert set(loaded) <= {*guesses[:3], *recent}
        assert [expert for expert in loaded if expert not in guesses[:3]] == [
            expert for expert in recent if expert in loaded and expert not in guesses[:3]
        ]
        prefetch.learn(layer, chosen)
