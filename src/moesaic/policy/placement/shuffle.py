"""Plans token shuffling under tensor-parallel attention: which row of a batch goes to which rank, in which
order.

Every rank has a partial sum of every row. A reduce-scatter with permuted rows leaves each row on the rank
with its predicted experts. An all-gather with the inverse permutation restores the batch (Speculative MoE,
Algorithm 2; Sem-MoE, Algorithm 3). Between the two, residual and norm use the permuted order. All ranks
compute the same plan from the same tables.

The papers align the groups of a permutation without saying how. A reduce-scatter of equal shards allows at
most ceil(rows / ranks) rows on a rank. Here, the least certain rows of a fuller rank move. With shards of
any size no row moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

Align = Literal["move", "variable", "none"]
"""How rows are divided into shards.

  - move: equal shards. The least certain rows move.
  - variable: every row is on its predicted rank, and shards have any size.
  - none: the batch keeps its order and is cut into equal shards: a reduce-scatter without prediction.
"""


@dataclass(frozen=True)
class Shuffle:
    """The order of n rows and their division into shards, one for each rank."""

    order: IntArray
    """[n] row order[i] of the batch moves to index i: shuffled = batch[order]."""
    sizes: IntArray
    """[ranks] number of rows of each rank. They are consecutive in the shuffled order."""
    num_kept: int
    """Number of rows on their predicted rank."""

    @cached_property
    def inverse(self) -> IntArray:
        """[n] row i of the batch moves to index inverse[i]: batch = shuffled[inverse]."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    @cached_property
    def ranks(self) -> IntArray:
        """[n] the rank of each row of the batch."""
        ranks = np.empty_like(self.order)
        ranks[self.order] = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return ranks

    @property
    def starts(self) -> IntArray:
        """[ranks + 1] bounds of the shards: rank i has indices starts[i] : starts[i + 1]."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @property
    def share_kept(self) -> float:
        """Share of the rows on their predicted rank; 1 without rows.

        The other rows are what `move` costs in locality.
        """
        return self.num_kept / len(self.order) if len(self.order) else 1.0

    def local_pairs(self, experts: npt.NDArray[Any], owners: npt.NDArray[Any]) -> int:
        """Number of (row, expert) pairs with the expert on the row's rank, once the gate has chosen.

        experts: [n, k] of the batch in its own order. owners: [E] the rank of each expert.
        """
        return int((owners[experts] == self.ranks[:, None]).sum())


def plan(predicted_ranks: IntArray, confidence: npt.NDArray[Any], ranks: int, align: Align) -> Shuffle:
    """Plan the permutation and the sizes of the shards. Rows of one rank keep the batch's order.

    predicted_ranks, confidence: [n] from `predict.predict`. Between equally certain rows, the later one
    moves. Rows that move are handled in the batch's order. Each goes to the rank with the fewest rows at that
    moment; ties go to the lower rank.

    Example: predicted [1, 1, 0, 1, 1], confidence [.9, .2, .5, .8, .7], 2 ranks. Rank 1 may have 3 rows,
    and row 1 is the least certain. `move` gives order [1, 2, 0, 3, 4] and sizes [2, 3], with 4 of 5 rows
    kept. `variable` gives order [2, 0, 1, 3, 4] and sizes [1, 4]. `none` gives order [0, 1, 2, 3, 4] and
    sizes [3, 2], with 3 rows kept.
    """
    rows = len(predicted_ranks)
    if align == "none":
        target = np.sort(np.arange(rows) % ranks)
    elif align == "move":
        target = _move_rows(predicted_ranks, confidence, ranks)
    else:
        target = predicted_ranks
    order = np.argsort(target, kind="stable")
    sizes = np.bincount(target, minlength=ranks)
    return Shuffle(order, sizes, int((target == predicted_ranks).sum()))


def _move_rows(predicted_ranks: IntArray, confidence: npt.NDArray[Any], ranks: int) -> IntArray:
    """[n] the rank of each row, with at most ceil(n / ranks) rows on a rank."""
    rows = len(predicted_ranks)
    capacity = -(-rows // ranks)
    sizes = np.bincount(predicted_ranks, minlength=ranks)
    if not rows or sizes.max() <= capacity:
        return predicted_ranks
    surest = np.lexsort((-confidence, predicted_ranks))  # stable: of equal ones the earlier row comes first
    place = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    movers = np.sort(surest[place >= capacity])
    room = np.arange(capacity)[:, None] >= sizes  # [capacity, ranks] free indices, the emptiest rank's first
    target = predicted_ranks.copy()
    target[movers] = np.nonzero(room)[1][: len(movers)]
    return target
