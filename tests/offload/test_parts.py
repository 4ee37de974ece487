from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.core.test_tokens import WHOLE, batch, batches

from moesaic.core.tokens import TokenBatch
from moesaic.offload.parts import divide_by_context, divide_by_rows, divide_by_sequences, is_cut


@given(batches(), st.integers(1, 7))
def test_micro_batches_of_sequences_have_each_once_and_no_more_than_allowed(
    whole: TokenBatch, largest: int
) -> None:
    parts = divide_by_sequences(whole, largest)
    rows = sorted(chain.from_iterable(origin.tolist() for _, origin in parts))
    assert rows == list(range(whole.num_rows))
    assert len(parts) == -(-whole.num_sequences // largest)
    for part, origin in parts:
        assert 0 < part.num_sequences <= largest
        assert part.token_ids.tolist() == origin.tolist()


def test_micro_batches_have_about_as_many_cached_tokens() -> None:
    """Four sequences have 40, 30, 20 and 10 cached tokens. Each of two micro-batches has 50."""
    whole = batch([1, 1, 1, 1], before=[39, 29, 19, 9], wanted=[0, 1, 2, 3])
    assert [sum(part.context_lens) for part, _ in divide_by_sequences(whole, 2)] == [50, 50]


def test_worked_example_of_rows() -> None:
    assert [origin.tolist() for _, origin in divide_by_rows(WHOLE, 4, whole_sequences=False)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert [origin.tolist() for _, origin in divide_by_rows(WHOLE, 2, whole_sequences=True)] == [
        [0, 1, 2],
        [3],
        [4, 5],
    ]
    assert [origin.tolist() for _, origin in divide_by_rows(WHOLE, 4, whole_sequences=True)] == [
        [0, 1, 2, 3],
        [4, 5],
    ]


@given(batches(), st.integers(1, 9), st.booleans())
def test_micro_batches_of_rows_come_in_order_and_are_no_larger_than_allowed(
    whole: TokenBatch, largest: int, uncut: bool
) -> None:
    parts = divide_by_rows(whole, largest, uncut)
    assert np.concatenate([origin for _, origin in parts]).tolist() == list(range(whole.num_rows))
    for part, origin in parts:
        assert part.token_ids.tolist() == origin.tolist()
        assert 0 < part.num_rows <= largest or (uncut and part.num_sequences == 1)
    if uncut:
        assert sum(part.num_sequences for part, _ in parts) == whole.num_sequences
    else:
        sizes = [part.num_rows for part, _ in parts]
        assert max(sizes) - min(sizes) <= 1


def test_worked_example_of_contexts() -> None:
    """Three sequences have 1 new token of 1, 5 of 5, and 1 of 9. With at most 3 tokens the second one is cut.
    Its end is alone, since it has 5 tokens."""
    whole = batch([1, 5, 1], before=[0, 0, 8], wanted=[0])
    assert [origin.tolist() for _, origin in divide_by_context(whole, whole.context_lens, 3, False)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]
    assert [origin.tolist() for _, origin in divide_by_context(whole, whole.context_lens, 3, True)] == [
        [0],
        [1, 2, 3, 4, 5],
        [6],
    ]
    assert is_cut(whole, divide_by_context(whole, whole.context_lens, 3, False)) and not is_cut(
        whole, divide_by_context(whole, whole.context_lens, 5, False)
    )


@given(batches(), st.integers(1, 9))
def test_micro_batches_of_contexts_have_no_more_tokens_than_allowed_unless_alone(
    whole: TokenBatch, largest: int
) -> None:
    parts = divide_by_context(whole, whole.context_lens, largest, whole_sequences=False)
    assert np.concatenate([origin for _, origin in parts]).tolist() == list(range(whole.num_rows))
    for part, origin in parts:
        assert part.token_ids.tolist() == origin.tolist() and part.num_rows <= largest
        assert part.context_lens.sum() <= largest or part.num_sequences == 1
    found = sum(part.num_sequences for part, _ in parts) > whole.num_sequences
    assert is_cut(whole, parts) is found
