"""What is left out of a product loses no pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairs import cover, params, some, thinned


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
    kept = [case for case, marks in made.items() if "full" not in marks]
    assert set(cover("ab", "xy", (1, 2))) <= set(kept)
    assert all(marks in ({"slow"}, {"full"}) for case, marks in made.items() if case != ("a", "x", 1))


def test_a_coarser_key_needs_fewer_cases_and_still_takes_every_choice() -> None:
    cases = list(product("abcdef", range(10), range(2)))
    found = thinned(cases, lambda case: (case[0] in "abc", *case[1:]), spread=True)
    assert len(found) == 20 < len(cover("abcdef", range(10), range(2)))
    assert {(one in "abc", two) for one, two, _ in found} == set(product((True, False), range(10)))
    assert {one for one, _, _ in found} == set("abcdef")


def test_some_are_slow_and_the_others_full() -> None:
    cases = [("a", 1), ("a", 2), ("b", 1)]
    made = {one.values: [mark.name for mark in one.marks] for one in some(cases, cases[1:2])}
    assert made == {("a", 1): ["full"], ("a", 2): ["slow"], ("b", 1): ["full"]}
    assert [one.values for one in some("xy", "y")] == [("x",), ("y",)]
    with pytest.raises(ValueError, match=r"^now: got \['z'\]; allowed: some of \['x', 'y'\]$"):
        some("xy", "z")
