"""Parts of a step's rows are steps of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.tokens import TokenBatch


def batch(rows: list[int], before: list[int], wanted: list[int]) -> TokenBatch:
    """A batch of sequences with these numbers of rows, and of tokens in the cache before them. Token ids are
    row numbers."""
    starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
    positions = [np.arange(old, old + count, dtype=np.int64) for old, count in zip(before, rows, strict=True)]
    return TokenBatch(
        token_ids=np.arange(starts[-1]),
        positions=np.concatenate([np.zeros(0, np.int64), *positions]),
        query_starts=starts,
        context_lens=np.array(before) + np.array(rows),
        block_tables=np.array([[10 * index, 10 * index + 1] for index in range(len(rows))]),
        logit_rows=np.array(wanted, dtype=np.int64),
    )


WHOLE = batch([3, 1, 2], before=[0, 7, 4], wanted=[2, 3, 5])


def test_worked_example_of_sequences() -> None:
    part = WHOLE.sequences([2, 0])
    assert part.token_ids.tolist() == [4, 5, 0, 1, 2]
    assert part.positions.tolist() == [4, 5, 0, 1, 2]
    assert part.query_starts.tolist() == [0, 2, 5]
    assert part.context_lens.tolist() == [6, 3]
    assert part.block_tables.tolist() == [[20, 21], [0, 1]]
    assert part.logit_rows.tolist() == [1, 4]


def test_worked_example_of_rows_that_cut_a_sequence() -> None:
    first, rest = WHOLE.rows(0, 2), WHOLE.rows(2, 6)
    assert first.context_lens.tolist() == [2] and first.logit_rows.tolist() == []
    assert rest.query_starts.tolist() == [0, 1, 2, 4] and rest.context_lens.tolist() == [3, 8, 6]
    assert rest.block_tables.tolist() == WHOLE.block_tables.tolist()
    assert rest.logit_rows.tolist() == [0, 1, 3]


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    before = [draw(st.integers(0, 9)) for _ in rows]
    wanted = draw(st.sets(st.integers(0, sum(rows) - 1)))
    return batch(rows, before, sorted(wanted))


@given(batches(), st.data())
def test_every_row_stays_what_it_is_wherever_it_is_cut(whole: TokenBatch, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, whole.num_rows - 1))
    stop = data.draw(st.integers(start + 1, whole.num_rows))
    part = whole.rows(start, stop)
    assert part.token_ids.tolist() == list(range(start, stop))
    assert part.positions.tolist() == whole.positions[start:stop].tolist()
    assert (start + part.logit_rows).tolist() == [row for row in whole.logit_rows if start <= row < stop]
    assert part.query_starts[0] == 0 and part.query_starts[-1] == part.num_rows
    for index, table in enumerate(part.block_tables):
        first, last = part.query_starts[index], part.query_starts[index + 1] - 1
        assert last >= first
        assert part.context_lens[index] == part.positions[last] + 1  # it sees no later row
        whose = int(np.searchsorted(whole.query_starts, start + first, side="right")) - 1
        assert table.tolist() == whole.block_tables[whose].tolist()


@pytest.mark.parametrize("chosen", [[], [1], [0, 1, 2]])
def test_sequences_keep_the_rest_of_the_record(chosen: list[int]) -> None:
    part = WHOLE.sequences(chosen)
    assert part.num_sequences == len(chosen) and part.block_tables.shape[1] == 2
    assert part.token_ids.dtype == part.logit_rows.dtype == np.int64
