"""What is left out of a product loses no pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairs import cover, params


@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (3, 3, 2, 8), (3, 2, 22, 2), (5, 1, 2)], ids=str)
def test_every_pair_occurs(sizes: tuple[int, ...]) -> None:
    factors = [range(size) for size in sizes]
    found = cover(*factors)
    assert len(set(found)) == len(found) <= 1.3 * max(a * b for a, b in combinations(sizes, 2))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in found} == set(product(factors[i], factors[j]))


def test_marks() -> None:
    made = {
        one.values: {mark.name for mark in one.marks}
        for one in params("ab", "xy", (1, 2), fast=[("a", "x", 1)])
    }
    assert set(made) == set(product("ab", "xy", (1, 2)))
    assert made["a", "x", 1] == set()
    kept = [case for case, marks in made.items() if "matrix" not in marks]
    assert set(cover("ab", "xy", (1, 2))) <= set(kept)
    assert all("slow" in marks for case, marks in made.items() if case != ("a", "x", 1))
