"""Covers of all pairs: `make test` runs a cover of a product of settings, and `make full` runs the rest."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

Key = Callable[[tuple[Any, ...]], tuple[Any, ...]]
REST = pytest.mark.full


def cover(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choices, one of each factor, in which every pair of choices of two factors occurs."""
    return thinned(list(itertools.product(*factors)))


def thinned(cases: Sequence[tuple[Any, ...]], key: Key = lambda case: case) -> list[tuple[Any, ...]]:
    """Those of `cases` that keep every pair of choices that occurs in their keys.

    Where keys are coarser than cases, the choices that were taken least often come next.
    """
    known: dict[tuple[int, Any, int, Any], int] = {}
    bits = [
        sum(
            1 << known.setdefault((i, a, j, b), len(known))
            for (i, a), (j, b) in itertools.combinations(enumerate(key(case)), 2)
        )
        for case in cases
    ]
    left, chosen = (1 << len(known)) - 1, []
    taken = Counter[tuple[int, Any]]()

    def loss(number: int) -> tuple[int, int, int]:
        """Which only grows, so that a case whose old loss is not the least need not be looked at again."""
        used = sum(taken[choice] for choice in enumerate(cases[number]))
        return -(bits[number] & left).bit_count(), used, number

    waiting = [loss(number) for number in range(len(cases))]
    heapq.heapify(waiting)
    while left:
        best = waiting[0][2]
        if loss(best) != waiting[0]:
            heapq.heapreplace(waiting, loss(best))
            continue
        left &= ~bits[best]
        taken.update(enumerate(cases[best]))
        chosen.append(cases[best])
    return chosen


def params(
    *factors: Iterable[Any], fast: Collection[tuple[Any, ...]] = (), key: Key = lambda case: case
) -> list[Any]:
    """The whole product. The cover is marked `slow` and what is not in it `full`.

    fast: cases without a mark, which need not be in the cover.
    key: the cover has the pairs that occur in the keys of cases, as where settings are alike.
    """
    choices = [list(factor) for factor in factors]
    covering = thinned(list(itertools.product(*choices)), key)
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow if case in covering else REST)
        for case in itertools.product(*choices)
    ]
