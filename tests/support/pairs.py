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


def thinned(
    cases: Sequence[tuple[Any, ...]], key: Key = lambda case: case, spread: bool = False
) -> list[tuple[Any, ...]]:
    """Those of `cases` that keep every pair of choices that occurs in their keys.

    spread: of cases that are equally good, one whose choices were taken least often; else the first.
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
        used = sum(taken[choice] for choice in enumerate(cases[number])) if spread else 0
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


def some(cases: Iterable[Any], now: Collection[Any]) -> list[Any]:
    """Every case by its settings. Those in `now` are marked `slow`, the others `full`."""
    every = list(cases)
    unknown = [case for case in now if case not in every]
    if unknown:
        raise ValueError(f"now: got {unknown}; allowed: some of {every}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if case in now else REST
        )
        for case in every
    ]


def params(
    *factors: Iterable[Any], fast: Collection[tuple[Any, ...]] = (), key: Key | None = None
) -> list[Any]:
    """The whole product. The cover is marked `slow` and what is not in it `full`.

    fast: cases without a mark, which need not be in the cover.
    key: where some choices are alike, what counts of a case. The cover has the pairs that occur in keys.
    """
    choices = [list(factor) for factor in factors]
    every = list(itertools.product(*choices))
    covering = thinned(every, key, spread=True) if key else thinned(every)
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow if case in covering else REST)
        for case in every
    ]
