"""Covers of all pairs: what `make test` runs of a product of settings; `make soak` runs the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

Key = Callable[[tuple[Any, ...]], tuple[Any, ...]]
REST = (pytest.mark.slow, pytest.mark.matrix)


def cover(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Choices, one of each factor, in which every pair of choices of two factors occurs."""
    return thinned(list(itertools.product(*factors)))


def thinned(cases: Sequence[tuple[Any, ...]], key: Key = lambda case: case) -> list[tuple[Any, ...]]:
    """Those of `cases` that keep every pair of choices that occurs in their keys."""
    known: dict[tuple[int, Any, int, Any], int] = {}
    bits = [
        sum(
            1 << known.setdefault((i, a, j, b), len(known))
            for (i, a), (j, b) in itertools.combinations(enumerate(key(case)), 2)
        )
        for case in cases
    ]
    left, chosen = (1 << len(known)) - 1, []
    while left:
        best = max(range(len(cases)), key=lambda number: (bits[number] & left).bit_count())
        left &= ~bits[best]
        chosen.append(cases[best])
    return chosen


def params(*factors: Iterable[Any], fast: Collection[tuple[Any, ...]] = ()) -> list[Any]:
    """The whole product, what is not in the cover marked `matrix`, and all but `fast` marked `slow`.

    fast: also in the cover, if they are in the product.
    """
    choices = [list(factor) for factor in factors]
    covering = cover(*choices)
    return [
        pytest.param(*case, marks=() if case in fast else pytest.mark.slow if case in covering else REST)
        for case in itertools.product(*choices)
    ]
