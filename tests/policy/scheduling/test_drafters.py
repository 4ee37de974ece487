"""Drafters, against slow and obvious versions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.scheduling.drafters import NgramDrafter, NoDrafter


def obvious(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The longest run first, and of each the last place; then copied token by token."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                known = list(tokens)
                for place in range(start + length, start + length + most):
                    known.append(known[place])
                return known[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 9),
)
def test_ngrams_are_found_as_by_the_obvious_version(
    tokens: list[int], shortest: int, more: int, most: int
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    assert drafter.propose(np.array(tokens), most) == obvious(tokens, shortest, shortest + more, most)


def test_nothing_is_changed() -> None:
    tokens = np.array([1, 2, 3, 1, 2])
    assert NgramDrafter(1, 2).propose(tokens, 2) == [3, 1] == NgramDrafter(1, 2).propose(tokens, 2)
    assert tokens.tolist() == [1, 2, 3, 1, 2]
    assert NoDrafter().propose(tokens, 2) == []
