"""Chooses the experts to load to the fast level before their layer's gate has chosen.

There are two sources of guesses. First come the experts that the layer's own gate chooses from the rows of
the layer before, since a layer changes its rows little. Recent choices follow. A wrong guess never changes an
answer, but it costs a read, and on a CPU also time of a core that would compute. So guesses are compared with
what the gates chose, also those that were not loaded. Only ranks that are right often enough are loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

FADES = 0.5
"""Weight of a choice after one more step; 1 when it is new."""


WORTHWHILE = 0.5
"""Minimum share of right guesses among those that are loaded.

Where computing hides a part h of the time of a read, a right guess saves h reads and a wrong one costs 1 - h.
So a guess pays if the share of right ones is above 1 - h. 0.5 fits where half is hidden. docs/offloading.md
has the speed with other shares.
"""
FORGETS = 0.999
"""Weight of a guess after those of one more layer."""


class GuessRecord:
    """How often the guesses of one source were right, by their rank.

    >>> record = GuessRecord(4)
    >>> record.learn([2, 0, 1], np.array([0, 2]))
    >>> record.num_worthwhile()
    2
    """

    def __init__(self, num_experts: int) -> None:
        self._num_guesses, self._num_right = np.zeros(num_experts), np.zeros(num_experts)

    def learn(self, guesses: Sequence[int], chosen_experts: IntArray) -> None:
        """Compare guesses of a layer, the most likely first, with the experts that its gate chose."""
        self._num_guesses *= FORGETS
        self._num_right *= FORGETS
        self._num_guesses[: len(guesses)] += 1
        self._num_right[: len(guesses)] += np.isin(guesses, chosen_experts)

    def num_worthwhile(self) -> int:
        """How many of the first ranks should be loaded: those that together save most. 0 before `learn`."""
        shares = self._num_right / np.maximum(self._num_guesses, 1.0)
        gains = np.cumsum(shares - WORTHWHILE)
        best = int(gains.argmax())
        return best + 1 if gains[best] > 0 else 0


class ExpertPrefetch:
    """Counts how often each expert of each layer was chosen, and how often guesses were right.

    >>> prefetch = ExpertPrefetch(4)
    >>> prefetch.learn(0, np.array([1, 3, 3]))
    >>> prefetch.rank_recent(0), prefetch.rank_recent(1)
    ([3, 1], [])
    """

    def __init__(self, num_experts: int, fades: float = FADES) -> None:
        """fades: weight of a choice after one more step."""
        self._num_experts, self._fades = num_experts, fades
        self._counts: dict[int, npt.NDArray[np.float64]] = {}
        self._by_gate, self._by_count = GuessRecord(num_experts), GuessRecord(num_experts)
        self._guesses: dict[int, tuple[list[int], list[int]]] = {}
        """Layer -> the guesses of both sources, until its gate has chosen."""

    def learn(self, layer: int, chosen_experts: IntArray) -> None:
        """Count the choices of one step, and compare its guesses with them. chosen_experts: [p] experts."""
        counts = np.bincount(chosen_experts, minlength=self._num_experts)
        self._counts[layer] = counts + self._fades * self.choice_counts(layer)
        if layer in self._guesses:
            by_gate, by_count = self._guesses.pop(layer)
            self._by_gate.learn(by_gate, chosen_experts)
            self._by_count.learn(by_count, chosen_experts)

    def forget_guesses(self) -> None:
        """Compare no guess of `experts` with later choices."""
        self._guesses.clear()

    def choice_counts(self, layer: int) -> npt.NDArray[np.float64]:
        """[E] how often each expert of a layer was chosen."""
        return self._counts.get(layer, np.zeros(self._num_experts))

    def rank_recent(self, layer: int) -> list[int]:
        """The experts of a layer that were chosen, the most frequent first."""
        counts = self.choice_counts(layer)
        return [int(expert) for expert in np.argsort(-counts, kind="stable") if counts[expert] > 0]

    def experts(
        self,
        layer: int,
        max_count: int,
        excluded_experts: Collection[int],
        guessed_experts: Iterable[int] = (),
    ) -> list[int]:
        """The experts of a layer that are worth loading, at most `max_count` and the most likely first.

        guessed_experts: by the layer's own gate, the most likely first. None of `excluded_experts` is
        returned.
        """
        by_gate = [expert for expert in guessed_experts if expert not in excluded_experts][:max_count]
        seen_experts = {*excluded_experts, *by_gate}
        by_count = [expert for expert in self.rank_recent(layer) if expert not in seen_experts][:max_count]
        self._guesses[layer] = by_gate, by_count
        likely = by_gate[: self._by_gate.num_worthwhile()] + by_count[: self._by_count.num_worthwhile()]
        return likely[:max_count]


def order_guesses(expert_ids: Sequence[IntArray]) -> list[int]:
    """Experts by their best place in a row. expert_ids: of micro-batches, [n, k] of rows, best first.

    >>> order_guesses([np.array([[3, 1], [2, 3]]), np.array([[0, 1]])])
    [3, 2, 0, 1]
    """
    if not expert_ids:
        return []
    return list(dict.fromkeys(np.concatenate(expert_ids).ravel(order="F").tolist()))
