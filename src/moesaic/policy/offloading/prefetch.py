"""Chooses the experts to load to the fast level before their layer's gate has chosen.

First come those that the layer's own gate chooses from the rows of the layer before. A layer changes its
rows little, so most of them are right. Recent choices follow. A wrong guess costs a transfer on a link that
was idle. It never changes an answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FADES = 0.5
"""Weight of a choice after one more step; 1 when it is new."""


class ExpertPrefetch:
    """Counts how often each expert of each layer was chosen. Recent steps count most.

    >>> prefetch = ExpertPrefetch(4)
    >>> prefetch.learn(0, np.array([1, 3, 3]))
    >>> prefetch.experts(0, 2, excluded_experts={1}), prefetch.experts(1, 2, excluded_experts=())
    ([3], [])
    """

    def __init__(self, num_experts: int, fades: float = FADES) -> None:
        """fades: weight of a choice after one more step."""
        self._num_experts, self._fades = num_experts, fades
        self._counts: dict[int, npt.NDArray[np.float64]] = {}

    def learn(self, layer: int, chosen_experts: IntArray) -> None:
        """Count the choices of one step. chosen_experts: [p] experts."""
        counts = np.bincount(chosen_experts, minlength=self._num_experts)
        self._counts[layer] = counts + self._fades * self.choice_counts(layer)

    def choice_counts(self, layer: int) -> npt.NDArray[np.float64]:
        """[E] how often each expert of a layer was chosen."""
        return self._counts.get(layer, np.zeros(self._num_experts))

    def experts(
        self,
        layer: int,
        max_count: int,
        excluded_experts: Collection[int],
        guessed_experts: Iterable[int] = (),
    ) -> list[int]:
        """The most likely experts of a layer, at most `max_count`.

        guessed_experts: come first. Of the others only those that were chosen there before count, and none
        of `excluded_experts`.
        """
        counts = self.choice_counts(layer)
        recent = (int(expert) for expert in np.argsort(-counts, kind="stable") if counts[expert] > 0)
        candidates = dict.fromkeys(itertools.chain(guessed_experts, recent))
        likely = (expert for expert in candidates if expert not in excluded_experts)
        return list(itertools.islice(likely, max_count))


def order_guesses(expert_ids: Sequence[IntArray]) -> list[int]:
    """Experts by their best place in a row. expert_ids: of micro-batches, [n, k] of rows, best first.

    >>> order_guesses([np.array([[3, 1], [2, 3]]), np.array([[0, 1]])])
    [3, 2, 0, 1]
    """
    if not expert_ids:
        return []
    return list(dict.fromkeys(np.concatenate(expert_ids).ravel(order="F").tolist()))
