"""Exchanges pairs of experts between ranks while that gains: the fine-tuning of Sem-MoE's Algorithm 1.

The paper picks two clusters and one expert of each at random and swaps them if that raises the affinity.
Here the gains of all pairs are known, and a random one of those that gain is taken until there is none. The
paper's loop would end there with enough steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]

EXACT = 1e-9
"""A smaller gain is rounding."""


@dataclass(frozen=True)
class Affinity:
    """The value of one layer's labels [E]; see `value`."""

    pairs: FloatArray
    """[E, E] symmetric: value of two experts on one rank."""
    ranks: FloatArray
    """[E, R] value of an expert on a rank."""
    loads: FloatArray
    """[E] load of an expert; a rank's load costs its square."""

    def value(self, labels: IntArray) -> float:
        """Value of pairs on one rank, plus each expert's value on its rank, minus squares of the ranks'
        loads."""
        same = labels[:, None] == labels
        pairs = (self.pairs * same).sum() - np.diagonal(self.pairs).sum()
        carried = np.bincount(labels, weights=self.loads, minlength=self.ranks.shape[1])
        return float(pairs / 2 + self.ranks[np.arange(len(labels)), labels].sum() - (carried**2).sum())

    def gains(self, labels: IntArray) -> FloatArray:
        """[E, E] what exchanging the ranks of two experts adds to the value; on one rank nothing."""
        each = np.arange(len(labels))
        held = np.eye(self.ranks.shape[1])[labels]
        carried = (self.loads @ held)[labels]
        worth = self.pairs @ held + self.ranks
        worth[each, labels] -= np.diagonal(self.pairs)
        moved = worth[:, labels] - worth[each, labels][:, None]
        more = self.loads[:, None] - self.loads
        squares = 2 * more * (carried - carried[:, None] + more)
        gains: FloatArray = moved + moved.T - 2 * self.pairs - squares
        gains[labels[:, None] == labels] = 0.0
        return gains


def swapped(affinity: Affinity, labels: IntArray, rng: np.random.Generator, steps: int) -> IntArray:
    """`labels` [E] after at most `steps` exchanges that each gain.

    Example: experts 0, 1 and 2, 3 belong together but are placed 0, 2 | 1, 3: one exchange corrects that.
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
