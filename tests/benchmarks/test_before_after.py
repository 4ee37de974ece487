"""The interval of a median over rounds, and the rows of `before_after.py`."""

from __future__ import annotations

import math

import before_after
import pytest


@pytest.mark.parametrize(("count", "rank"), [(3, 0), (6, 0), (9, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_is_that_of_the_order_statistics(count: int, rank: int) -> None:
    values = [float(value) for value in reversed(range(count))]
    assert before_after.median_interval(values) == ((count - 1) / 2, rank, count - 1 - rank)
    outside = 2 * sum(math.comb(count, k) for k in range(rank + 1)) / 2**count
    assert outside <= 0.05 or rank == 0


def test_a_tree_with_other_tokens_and_half_of_the_speed_is_seen() -> None:
    base = [{"prefill_s": 1.0, "decode_s": 2.0, "tokens": [[1]]}] * 3
    slow = [{"prefill_s": 2.0, "decode_s": 4.0, "tokens": [[2]]}] * 3
    first, second = before_after.rows({"before": base, "after": slow}, 1)
    assert first["same_tokens"] and not second["same_tokens"]
    assert second["decode_s"] == {"median_s": 4.0, "ratio": (2.0, 2.0, 2.0)}
