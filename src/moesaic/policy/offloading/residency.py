"""Decides which experts stay on the fast level, by how often each one was chosen lately.

The counts fade, so the choice follows what is asked. This is the policy "least frequently used" with aging.
It changes only how much is read, never an answer.

Question: Which experts stay in the fast memory?
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence

from moesaic.core.tokens import IntArray
from moesaic.policy.offloading.prefetch import ExpertPrefetch

FADES = 0.98
"""Weight of a choice after one more step of its layer; 1 when it is new."""
HOTTER = 1.25
"""An expert takes the place of another one if it was chosen this many times as often."""
Key = tuple[int, int]
"""A layer, and an expert of it."""


class HotExperts:
    """Counts choices, and says whose place an expert takes.

    >>> import numpy as np
    >>> hot = HotExperts(4)
    >>> hot.learn(0, np.array([1, 3, 3]))
    >>> hot.exchanges(0, stays={0, 1}, coming=[3], chosen_experts={1, 3})
    [(0, 3)]
    >>> hot.coldest([(0, 1), (0, 2), (0, 3)], needed_experts={(0, 2)}, count=1)
    [(0, 1)]
    """

    def __init__(self, num_experts: int) -> None:
        self._counts = ExpertPrefetch(num_experts, FADES)

    def learn(self, layer: int, chosen_experts: IntArray) -> None:
        """Counts the choices of one step. chosen_experts: [p] experts."""
        self._counts.learn(layer, chosen_experts)

    def choice_counts(self, layer: int) -> Sequence[float]:
        """[E] how often each expert of a layer was chosen lately."""
        counts: list[float] = self._counts.choice_counts(layer).tolist()
        return counts

    def exchanges(
        self, layer: int, stays: Collection[int], coming: Iterable[int], chosen_experts: Collection[int]
    ) -> list[Key]:
        """Pairs (expert that leaves, expert that stays in its place) of one layer.

        stays: the experts that stay now. coming: those that are about to be loaded. chosen_experts: those
        that are computed now, which may not leave. The hottest that comes takes the place of the coldest.
        """
        counts = self._counts.choice_counts(layer)
        coldest = sorted(set(stays) - set(chosen_experts), key=lambda expert: (counts[expert], expert))
        hottest = sorted(coming, key=lambda expert: (-counts[expert], expert))
        return [
            (out, new)
            for out, new in zip(coldest, hottest, strict=False)
            if counts[new] > HOTTER * counts[out]
        ]

    def coldest(self, resident: Iterable[Key], needed_experts: Collection[Key], count: int) -> list[Key]:
        """The `count` coldest resident experts of all layers that are not needed now, or all of these."""
        free = (key for key in resident if key not in needed_experts)
        return heapq.nsmallest(
            count, free, key=lambda key: (float(self._counts.choice_counts(key[0])[key[1]]), key)
        )
