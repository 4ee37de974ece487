"""Chooses the experts to load to the fast level before their layer's gate has chosen, by recent choices.

This works since rows of a decode step are the next tokens of the same requests, and since some experts are
chosen more often than others. A wrong guess costs a transfer on a link that was idle. It never changes an
answer.
"""

from __future__ import annotations

from collections.abc import Collection

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

    def experts(self, layer: int, max_count: int, excluded_experts: Collection[int]) -> list[int]:
        """The most likely experts of a layer, at most `max_count`.

        Only experts that were chosen there before and are not in `excluded_experts` count.
        """
        counts = self.choice_counts(layer)
        order = np.argsort(-counts, kind="stable")
        candidates = (int(one) for one in order if counts[one] > 0 and int(one) not in excluded_experts)
        return [one for _, one in zip(range(max_count), candidates, strict=False)]
