"""What a narrow cache costs, counted."""

from __future__ import annotations

import argparse

import cache_types
import pytest
from cache_types import Answered, Compared, answered, compared

from moesaic.core.request import TokenLogprob


def scores(*pairs: tuple[float, int]) -> list[TokenLogprob]:
    """From log-probabilities and most likely tokens."""
    return [TokenLogprob(5, logprob, [(best, -0.1)]) for logprob, best in pairs]


def test_differences_are_counted_token_by_token_and_answer_by_answer() -> None:
    whole = Answered(8.0, scores((-1.0, 1), (-2.0, 2), (-3.0, 3), (-4.0, 4)), [[1, 2, 3, 4], [5, 6, 7, 8]])
    other = Answered(3.0, scores((-1.5, 1), (-2.0, 2), (-2.0, 9), (-4.5, 4)), [[1, 2, 3, 4], [5, 0, 7, 8]])
    assert compared("int8", whole, whole) == Compared("int8", 8.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    found = compared("int8", other, whole)
    assert (found.token_bytes, found.mean_difference, found.largest_difference) == (3.0, 0.5, 1.0)
    assert found.change == 0.0
    assert (found.same_best, found.same_answers, found.before_the_first_other) == (0.75, 0.5, 5 / 8)


@pytest.mark.slow
def test_the_demo_in_int8_is_near_the_demo_in_float32() -> None:
    options = argparse.Namespace(text=cache_types.TEXTS[:1], pieces=2, length=100, new=8, kernels="auto")
    whole, narrow = (answered("demo", cache, options) for cache in ("float32", "int8"))
    found = compared("int8", narrow, whole)
    assert len(whole.scores) == 2 * 99 and len(whole.answers) == 2
    assert 4 * found.token_bytes < 1.2 * whole.token_bytes
    assert 0 < found.mean_difference < 0.1 and found.same_best > 0.9
