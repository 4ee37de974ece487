from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.offloading.prefetch import ExpertPrefetch

CHOSEN = st.lists(st.integers(0, 7), max_size=12).map(lambda ids: np.array(ids, np.int64))


def test_worked_example() -> None:
    """In one step expert 1 is chosen once and expert 3 twice, in the next expert 1 once. Then 1 counts 1.5
    and 3 counts 1."""
    likely = ExpertPrefetch(4)
    likely.learn(0, np.array([1, 3, 3]))
    assert likely.experts(0, 4, ()) == [3, 1]
    likely.learn(0, np.array([1]))
    assert likely.experts(0, 4, ()) == [1, 3] and likely.experts(0, 1, {1}) == [3]
    assert likely.experts(0, 3, {1}, guessed_experts=[2, 1, 0]) == [2, 0, 3]
    assert likely.experts(0, 0, ()) == likely.experts(1, 4, ()) == []


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), CHOSEN)), st.integers(0, 9), st.sets(st.integers(0, 7)))
def test_only_what_was_chosen_in_the_layer_and_the_most_frequent_first(
    steps: list[tuple[int, np.ndarray]], most: int, without: set[int]
) -> None:
    likely = ExpertPrefetch(8)
    for layer, chosen in steps:
        likely.learn(layer, chosen)
    mine = [chosen for layer, chosen in steps if layer == 0]
    found = likely.experts(0, most, without)
    known = {int(one) for chosen in mine for one in chosen} - without
    assert set(found) <= known and len(found) == min(most, len(known))
    score = [
        sum(0.5**age * int((one == chosen).sum()) for age, chosen in enumerate(mine[::-1]))
        for one in range(8)
    ]
    left = [score[one] for one in known - set(found)]
    assert [score[one] for one in found] == sorted((score[one] for one in found), reverse=True)
    assert not found or max(left, default=0) <= score[found[-1]]
