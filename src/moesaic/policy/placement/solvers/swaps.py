"""Exchanges pairs of experts between ranks as long as that gains: the fine-tuning of Sem-MoE's Algorithm 1.

The paper picks two clusters and one expert of each at random, and swaps them if that raises the affinity.
Here the gains of all pairs are known. A step takes a random pair among those that gain, until there is
none. With enough steps, the paper's loop would end there too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]

EXACT = 1e-9
"""Smaller gains count as rounding errors."""


@dataclass(frozen=True)
class Affinity:
    """The terms of the value of one layer's labels [E]. `value` adds them up."""

    pairs: FloatArray
    """[E, E] value of two experts on one rank; symmetric."""
    ranks: FloatArray
    """[E, R] value of each expert on each rank."""
    loads: FloatArray
    """[E] load of each expert. A rank costs the square of its load."""

    def value(self, labels: IntArray) -> float:
        """Value of the pairs on one rank, plus that of each expert on its rank, minus the squares of the
        ranks' loads."""
        on_same_rank = labels[:, None] == labels
        pairs = (self.pairs * on_same_rank).sum() - np.diagonal(self.pairs).sum()
        rank_loads = np.bincount(labels, weights=self.loads, minlength=self.ranks.shape[1])
        return float(pairs / 2 + self.ranks[np.arange(len(labels)), labels].sum() - (rank_loads**2).sum())

    def gains(self, labels: IntArray) -> FloatArray:
        """[E, E] gain in value from exchanging the ranks of two experts; 0 if they are on one rank."""
        indices = np.arange(len(labels))
        one_hot = np.eye(self.ranks.shape[1])[labels]
        rank_loads = (self.loads @ one_hot)[labels]
        values = self.pairs @ one_hot + self.ranks
        values[indices, labels] -= np.diagonal(self.pairs)
        move_gain = values[:, labels] - values[indices, labels][:, None]
        load_difference = self.loads[:, None] - self.loads
        squares = 2 * load_difference * (rank_loads - rank_loads[:, None] + load_difference)
        gains: FloatArray = move_gain + move_gain.T - 2 * self.pairs - squares
        gains[labels[:, None] == labels] = 0.0
        return gains


def swap_experts(affinity: Affinity, labels: IntArray, rng: np.random.Generator, steps: int) -> IntArray:
    """Make at most `steps` exchanges that each gain. Returns the changed `labels` [E].

    Example: experts 0, 1 and 2, 3 belong together but are placed 0, 2 | 1, 3. One exchange corrects that.
    """
    labels = labels.copy()
    for _ in range(steps):
        first, second = np.nonzero(np.triu(affinity.gains(labels) > EXACT))
        if not len(first):
            break
        pick = rng.integers(len(first))
        pair = [first[pick], second[pick]]
        labels[pair] = labels[pair[::-1]]
    return labels
