"""A plan is left for a clearly better one, and not before it was better for several steps."""

from __future__ import annotations

import random

import pytest

from moesaic.core.offload import Choice, Load
from moesaic.policy.offloading.revising import GAIN, PATIENCE, Revising, nearest

LOADS = Load(1, 256), Load(8, 256), Load(64, 256), Load(64, 2048)
FEW = Choice("on-demand", 1, 3, (1.0, 6.0, 40.0, 44.0))
MANY = Choice("cgopipe", 16, 0, (8.0, 6.2, 9.0, 20.0))


def test_the_first_step_takes_the_fastest() -> None:
    assert Revising(LOADS, (FEW, MANY)).choose(1, 100.0) is FEW
    assert Revising(LOADS, (FEW, MANY)).choose(60, 100.0) is MANY


def test_a_load_that_goes_back_and_forth_changes_nothing() -> None:
    revising = Revising(LOADS, (FEW, MANY))
    assert {revising.choose(count, 256.0) for count in (1, 64) * 50} == {FEW}
    assert revising.revisions == 0


def test_a_load_that_stays_changes_the_plan_once() -> None:
    revising = Revising(LOADS, (FEW, MANY))
    revising.choose(1, 256.0)
    found = [revising.choose(64, 256.0) for _ in range(3 * PATIENCE)]
    assert found[: PATIENCE - 1] == [FEW] * (PATIENCE - 1) and set(found[PATIENCE - 1 :]) == {MANY}
    assert revising.revisions == 1


def test_what_is_hardly_faster_is_not_taken() -> None:
    revising = Revising(LOADS, (FEW, MANY))
    revising.choose(64, 256.0)
    assert {revising.choose(8, 256.0) for _ in range(3 * PATIENCE)} == {MANY}, "6.2 over 6.0"


def test_whatever_the_load_the_plan_is_never_worse_for_long() -> None:
    rng, revising, worse = random.Random(3), Revising(LOADS, (FEW, MANY)), 0
    for _ in range(2000):
        requests, context = rng.choice([1, 2, 30, 64]), rng.uniform(1, 4000)
        for _ in range(rng.randint(1, 9)):
            chosen, place = revising.choose(requests, context), nearest(LOADS, requests, context)
            slow = chosen.seconds[place] > GAIN * min(FEW.seconds[place], MANY.seconds[place])
            worse = worse + 1 if slow else 0
            assert worse < PATIENCE


@pytest.mark.parametrize(
    ("requests", "context", "wanted"), [(1, 9000.0, 0), (3, 1.0, 1), (40, 300.0, 2), (40, 900.0, 3)]
)
def test_the_nearest_load_by_ratio(requests: int, context: float, wanted: int) -> None:
    assert nearest(LOADS, requests, context) == wanted


def test_without_choices_there_is_nothing_to_revise() -> None:
    with pytest.raises(ValueError, match="choices"):
        Revising(LOADS, ())
