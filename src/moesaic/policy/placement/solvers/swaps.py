"""Exchanges pairs of experts between ranks as long as that gains: the fine-tuning of Sem-MoE's Algorithm 1.

The paper picks two clusters and one expert of each at random, and swaps them if that raises the affinity.
Here the gains of all pairs are known. A step takes a random pair among those that gain, until there is
none. With enough steps, the paper's loop would end there too.

The square of a rank's load is a sum over pairs of its experts. So loads are part of the value of a pair, and
an exchange changes two columns of what each expert is worth on each rank.
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

    def pairs_with_loads(self) -> FloatArray:
        """[E, E] value of two experts on one rank, less what their loads cost there; 0 on the diagonal."""
        values: FloatArray = self.pairs - 2 * np.outer(self.loads, self.loads)
        np.fill_diagonal(values, 0.0)
        return values

    def gains(self, labels: IntArray) -> FloatArray:
        """[E, E] gain in value from exchanging the ranks of two experts; 0 if they are on one rank."""
        pairs = self.pairs_with_loads()
        gains = _exchange_gains(2 * pairs, self.worth(pairs, labels), labels)
        gains[labels[:, None] == labels] = 0.0
        return gains

    def worth(self, pairs: FloatArray, labels: IntArray) -> FloatArray:
        """[E, R] value of each expert on each rank, while the others stay. pairs: `pairs_with_loads`."""
        values: FloatArray = pairs @ np.eye(self.ranks.shape[1])[labels] + self.ranks
        return values


def _exchange_gains(twice_pairs: FloatArray, worth: FloatArray, labels: IntArray) -> FloatArray:
    """[E, E] gain in value from exchanging two experts, if they are on two ranks."""
    move_gains = worth[:, labels]
    move_gains -= worth[np.arange(len(labels)), labels][:, None]
    gains: FloatArray = move_gains + move_gains.T
    gains -= twice_pairs
    return gains


def swap_experts(affinity: Affinity, labels: IntArray, rng: np.random.Generator, steps: int) -> IntArray:
    """Make at most `steps` exchanges that each gain. Returns the changed `labels` [E].

    Example: experts 0, 1 and 2, 3 belong together but are placed 0, 2 | 1, 3. One exchange corrects that.
    """
    labels = labels.copy()
    size, pairs = len(labels), affinity.pairs_with_loads()
    twice_pairs, worth = 2 * pairs, affinity.worth(pairs, labels)
    is_first_half = np.triu(np.ones((size, size), dtype=np.bool_), 1)
    for _ in range(steps):
        is_gain = _exchange_gains(twice_pairs, worth, labels) > EXACT
        is_gain &= is_first_half
        is_gain &= labels[:, None] != labels
        found = np.flatnonzero(is_gain)
        if not len(found):
            break
        first, second = divmod(int(found[rng.integers(len(found))]), size)
        change = pairs[:, second] - pairs[:, first]
        worth[:, labels[first]] += change
        worth[:, labels[second]] -= change
        labels[[first, second]] = labels[[second, first]]
    return labels
