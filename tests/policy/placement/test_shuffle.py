from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.placement.shuffle import Align, plan

PREDICTED = np.array([1, 1, 0, 1, 1])
CONFIDENCE = np.array([0.9, 0.2, 0.5, 0.8, 0.7], dtype=np.float32)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[float], int]:
    """Strategy for predicted ranks, confidences (some of them equal) and the number of ranks."""
    ranks = draw(st.integers(1, 5))
    rows = draw(st.integers(0, 24))
    predicted = draw(st.lists(st.integers(0, ranks - 1), min_size=rows, max_size=rows))
    confidence = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=rows, max_size=rows))
    return predicted, confidence, ranks


def slow_targets(predicted: list[int], confidence: list[float], ranks: int, align: Align) -> list[int]:
    """The rank of each row, computed one row after the other."""
    rows = len(predicted)
    capacity = -(-rows // ranks)
    if align == "variable":
        return predicted
    if align == "none":
        return [
            rank for rank in range(ranks) for _ in range(rows // ranks + (1 if rank < rows % ranks else 0))
        ]
    target = list(predicted)
    movers = []
    for rank in range(ranks):
        mine = sorted(
            (row for row in range(rows) if predicted[row] == rank), key=lambda row: (-confidence[row], row)
        )
        movers += mine[capacity:]
    sizes = [sum(1 for row in range(rows) if predicted[row] == rank) for rank in range(ranks)]
    for row in movers:
        sizes[predicted[row]] -= 1
    for row in sorted(movers):
        rank = min(range(ranks), key=lambda rank: (sizes[rank], rank))
        target[row] = rank
        sizes[rank] += 1
    return target


@pytest.mark.parametrize(
    ("align", "order", "sizes", "kept"),
    [
        ("move", [1, 2, 0, 3, 4], [2, 3], 4),
        ("variable", [2, 0, 1, 3, 4], [1, 4], 5),
        ("none", [0, 1, 2, 3, 4], [3, 2], 3),
    ],
)
def test_worked_example(align: Align, order: list[int], sizes: list[int], kept: int) -> None:
    found = plan(PREDICTED, CONFIDENCE, 2, align)
    assert found.order.tolist() == order and found.sizes.tolist() == sizes and found.num_kept == kept
    assert found.share_kept == kept / 5
    assert found.starts.tolist() == [0, sizes[0], 5]


def test_inverse_and_ranks_of_the_worked_example() -> None:
    found = plan(PREDICTED, CONFIDENCE, 2, "move")
    assert found.inverse.tolist() == [2, 0, 1, 3, 4]
    assert found.ranks.tolist() == [1, 0, 0, 1, 1]


def test_local_pairs() -> None:
    """Experts 0 and 1 are on rank 0, 2 and 3 on rank 1. The rows are on ranks 1, 0, 0, 1, 1."""
    experts = np.array([[2, 3], [2, 0], [0, 1], [1, 0], [3, 0]])
    found = plan(PREDICTED, CONFIDENCE, 2, "move")
    assert found.local_pairs(experts, np.array([0, 0, 1, 1])) == 2 + 1 + 2 + 0 + 1


def test_nobody_moves_where_everybody_fits() -> None:
    found = plan(np.array([1, 0, 1, 0, 2]), np.zeros(5), 3, "move")
    assert found.order.tolist() == [1, 3, 0, 2, 4] and found.num_kept == 5


def test_the_emptiest_rank_is_filled_first() -> None:
    """All nine rows want rank 0 of four, and three may stay. Each other rank gets two, so none is empty."""
    found = plan(np.zeros(9, dtype=np.int64), np.linspace(1, 0, 9), 4, "move")
    assert found.sizes.tolist() == [3, 2, 2, 2]


@pytest.mark.parametrize("align", ["move", "variable", "none"])
def test_no_rows(align: Align) -> None:
    found = plan(np.zeros(0, dtype=np.int64), np.zeros(0), 3, align)
    assert found.sizes.tolist() == [0, 0, 0] and found.order.tolist() == [] and found.share_kept == 1.0


@given(batches(), st.sampled_from(["move", "variable", "none"]))
def test_equals_the_slow_one(batch: tuple[list[int], list[float], int], align: Align) -> None:
    predicted, confidence, ranks = batch
    found = plan(np.array(predicted, dtype=np.int64), np.array(confidence), ranks, align)
    target = slow_targets(predicted, confidence, ranks, align)
    assert found.ranks.tolist() == target
    rows = range(len(predicted))
    assert found.order.tolist() == [row for rank in range(ranks) for row in rows if target[row] == rank]
    assert found.sizes.tolist() == [target.count(rank) for rank in range(ranks)]
    assert found.num_kept == sum(one == other for one, other in zip(target, predicted, strict=True))


@given(batches(), st.sampled_from(["move", "variable", "none"]))
def test_properties(batch: tuple[list[int], list[float], int], align: Align) -> None:
    """The order is a permutation with its inverse. Shards are equal where that is promised. No row moves for
    a smaller gain than needed."""
    predicted, confidence, ranks = np.array(batch[0], dtype=np.int64), np.array(batch[1]), batch[2]
    rows, capacity = len(predicted), -(-len(predicted) // ranks)
    found = plan(predicted, confidence, ranks, align)
    values = np.random.default_rng(0).normal(size=(rows, 2))
    assert np.array_equal(values[found.order][found.inverse], values)
    assert found.sizes.sum() == rows and len(found.sizes) == ranks
    for rank, (start, end) in enumerate(zip(found.starts[:-1], found.starts[1:], strict=True)):
        assert (found.ranks[found.order[start:end]] == rank).all()
    if align != "variable":
        assert found.sizes.max() <= capacity
    if align == "move":  # no other plan of equal shards keeps more rows
        wanted = np.bincount(predicted, minlength=ranks)
        assert found.num_kept == np.minimum(wanted, capacity).sum()
        assert found.num_kept >= plan(predicted, confidence, ranks, "none").num_kept
