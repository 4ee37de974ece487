"""Which experts come to the fast level before their layer's gates have spoken: those that were chosen lately.

Rows of a decode step are the next tokens of the same requests, and some experts are chosen more than others.
A wrong guess costs what its bytes take on a link that had nothing else to do, and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FADES = 0.5
"""What a choice counts a step later."""


class ExpertPrefetch:
    """Of every layer, how often each expert was chosen, the last steps most.

    >>> likely = Likely(4)
    >>> likely.learn(0, np.array([1, 3, 3]))
    >>> likely.experts(0, 2, without={1}), likely.experts(1, 2, without=())
    ([3], [])
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._counts: dict[int, npt.NDArray[np.float64]] = {}

    def learn(self, layer: int, chosen: IntArray) -> None:
        """chosen: [p] experts that a step's rows chose."""
        counts = np.bincount(chosen, minlength=self._num_experts)
        self._counts[layer] = counts + FADES * self._counts.get(layer, np.zeros(self._num_experts))

    def experts(self, layer: int, most: int, without: Collection[int]) -> list[int]:
        """At most so many, the likeliest, of those that were ever chosen there and are not in `without`."""
        counts = self._counts.get(layer, np.zeros(0))
        order = np.argsort(-counts, kind="stable")
        known = (int(one) for one in order if counts[one] > 0 and int(one) not in without)
        return [one for _, one in zip(range(most), known, strict=False)]
