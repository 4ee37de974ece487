"""Decides which experts stay on the fast level, by how often each one was chosen.

Two counts of choices fade, one within a request and the other over many requests. The second one decides
where the first one says little, and it is kept from one start to the next. It changes only how much is read,
never an answer. `benchmarks/offload.py replay` compares this with other policies on recorded routes.

Question: Which experts stay in the fast memory?
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FADES = 0.95
"""Weight of a recent choice after one more step of its layer; 1 when it is new."""
LONG_CHOICES = 50_000
"""Choices of a layer after which an old one counts 1/e in the long count."""
LONG_SHARE = 0.25
"""Weight of the long count beside the recent one, when both are shares of all choices."""
Key = tuple[int, int]
"""A layer, and an expert of it."""
Counts = npt.NDArray[np.float64]
NO_COUNTS: Mapping[int, Sequence[float]] = {}


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

    def __init__(self, num_experts: int, long_counts: Mapping[int, Sequence[float]] = NO_COUNTS) -> None:
        """long_counts: layer -> [E] the long count of an earlier object."""
        self._num_experts = num_experts
        self._recent: dict[int, Counts] = {}
        self._long = {layer: np.array(counts, np.float64) for layer, counts in long_counts.items()}
        self._choices_of_step: dict[int, float] = {}

    def learn(self, layer: int, chosen_experts: IntArray, steps: float = 1.0) -> None:
        """Counts choices. chosen_experts: [p] experts. steps: in which they were made, at least 0.

        The rows of a prompt are as many steps, of which each made an equal part of the choices.
        """
        counts = np.bincount(chosen_experts, minlength=self._num_experts)
        fade = FADES**steps
        mean_weight = (1 - fade) / ((1 - FADES) * steps)
        self._recent[layer] = fade * self._find(self._recent, layer) + mean_weight * counts
        long_fade = float(np.exp(-len(chosen_experts) / LONG_CHOICES))
        self._long[layer] = long_fade * self._find(self._long, layer) + counts
        self._choices_of_step[layer] = len(chosen_experts) / steps

    @property
    def long_counts(self) -> dict[int, list[float]]:
        """Layer -> [E] the long count, from which another object goes on."""
        return {layer: counts.tolist() for layer, counts in self._long.items()}

    def heat(self, layer: int) -> Sequence[float]:
        """[E] how often each expert of a layer was chosen, mostly lately."""
        long_counts = self._find(self._long, layer)
        recent_sum = self._choices_of_step.get(layer, 1.0) / (1 - FADES)
        long_part = LONG_SHARE * recent_sum / max(long_counts.sum(), 1.0)
        heat: list[float] = (self._find(self._recent, layer) + long_part * long_counts).tolist()
        return heat

    def mean_shares(self) -> tuple[float, ...]:
        """[E] share of all choices of the hottest, the second and so on expert of a layer; mean of layers."""
        heats = [np.sort(self.heat(layer))[::-1] for layer in self._recent.keys() | self._long.keys()]
        shares = [heat / heat.sum() for heat in heats if heat.sum() > 0]
        if not shares:
            return (1.0 / self._num_experts,) * self._num_experts
        return tuple(np.mean(shares, axis=0).tolist())

    def exchanges(
        self, layer: int, stays: Collection[int], coming: Iterable[int], chosen_experts: Collection[int]
    ) -> list[Key]:
        """Pairs (expert that leaves, expert that stays in its place) of one layer.

        stays: the experts that stay now. coming: those that are about to be loaded. chosen_experts: those
        that are computed now, which may not leave. The hottest that comes takes the place of the coldest.
        """
        heat = self.heat(layer)
        coldest = sorted(set(stays) - set(chosen_experts), key=lambda expert: (heat[expert], expert))
        hottest = sorted(coming, key=lambda expert: (-heat[expert], expert))
        return [(out, new) for out, new in zip(coldest, hottest, strict=False) if heat[new] > heat[out]]

    def coldest(self, resident: Iterable[Key], needed_experts: Collection[Key], count: int) -> list[Key]:
        """The `count` coldest resident experts of all layers that are not needed now, or all of these."""
        free = [key for key in resident if key not in needed_experts]
        heat = {layer: self.heat(layer) for layer in {layer for layer, _ in free}}
        return heapq.nsmallest(count, free, key=lambda key: (heat[key[0]][key[1]], key))

    def _find(self, counts: Mapping[int, Counts], layer: int) -> Counts:
        return counts.get(layer, np.zeros(self._num_experts))


def choose_residents(experts: Sequence[int], counts: Sequence[float], count: int) -> list[int]:
    """The `count` experts that were chosen most often, ascending; of equal ones the first.

    experts: a layer's, from which to choose. counts: [E] how often each was chosen; empty: nobody knows.

    >>> choose_residents(range(4), [1.0, 5.0, 0.0, 5.0], 3), choose_residents([4, 6, 7], [], 2)
    ([0, 1, 3], [4, 6])
    """
    if not counts:
        return list(experts[:count])
    return sorted(sorted(experts, key=lambda expert: -counts[expert])[:count])
