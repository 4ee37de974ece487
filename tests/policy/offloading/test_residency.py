"""Which experts stay: those that were chosen most often lately."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moesaic.policy.offloading.residency import HotExperts, choose_residents


def taught(counts: dict[int, int], layer: int = 0, experts: int = 8) -> HotExperts:
    hot = HotExperts(experts)
    hot.learn(layer, np.repeat(list(counts), list(counts.values())))
    return hot


def test_the_hottest_takes_the_place_of_the_coldest() -> None:
    hot = taught({0: 1, 1: 9, 2: 5, 3: 4})
    assert hot.exchanges(0, stays={0, 1}, coming=[3, 2], chosen_experts={2, 3}) == [(0, 2)]
    assert hot.exchanges(0, stays={0, 7}, coming=[3, 2], chosen_experts={2, 3}) == [(7, 2), (0, 3)]


def test_what_is_computed_now_does_not_leave() -> None:
    hot = taught({0: 1, 2: 5})
    assert hot.exchanges(0, stays={0}, coming=[2], chosen_experts={0, 2}) == []


def test_experts_that_are_equally_hot_do_not_take_turns() -> None:
    hot = taught({0: 9, 2: 9})
    assert hot.exchanges(0, stays={0}, coming=[2], chosen_experts={2}) == []


def test_old_choices_fade() -> None:
    hot = taught({0: 50})
    for _ in range(300):
        hot.learn(0, np.array([2]))
    assert hot.exchanges(0, stays={0}, coming=[2], chosen_experts={2}) == [(0, 2)]


def test_the_coldest_of_all_layers_leave_first() -> None:
    hot = taught({0: 3, 1: 1})
    hot.learn(1, np.array([0, 0, 5]))
    resident = [(0, 0), (0, 1), (1, 0), (1, 5), (1, 6)]
    assert hot.coldest(resident, needed_experts={(1, 6)}, count=2) == [(0, 1), (1, 5)]
    assert hot.coldest(resident, needed_experts=set(resident), count=2) == []


def test_a_prompt_counts_as_its_steps() -> None:
    """Its rows are in no order that counts: 60 steps that chose 0 and 1 in turn."""
    prompt, steps = HotExperts(4), HotExperts(4)
    prompt.learn(0, np.array([0, 1] * 30), steps=60)
    for _ in range(60):
        steps.learn(0, np.array([0]), steps=0.5)
        steps.learn(0, np.array([1]), steps=0.5)
    assert prompt.heat(0)[0] == prompt.heat(0)[1]
    assert sum(prompt.heat(0)) == pytest.approx(sum(steps.heat(0)) / 2, rel=0.03)


def test_experts_of_earlier_runs_stay_until_others_are_clearly_hotter() -> None:
    hot = taught({0: 90, 1: 10})
    again = HotExperts(8, hot.long_counts)
    assert choose_residents(range(8), again.long_counts[0], 1) == [0]
    again.learn(0, np.array([5]))
    assert again.exchanges(0, stays={0}, coming=[5], chosen_experts={5}) == []
    for _ in range(9):
        again.learn(0, np.array([5]))
    assert again.exchanges(0, stays={0}, coming=[5], chosen_experts={5}) == [(0, 5)]


def test_a_skewed_choice_is_mostly_found_in_memory() -> None:
    """Beside the same experts always, which the first two of eight are."""
    rng, hot, stays, hits = np.random.default_rng(0), HotExperts(8), {0, 1}, Counter[bool]()
    chances = np.array([1, 1, 2, 30, 2, 1, 1, 30]) / 68
    for _ in range(500):
        chosen = set(rng.choice(8, 2, replace=False, p=chances).tolist())
        hits.update(expert in stays for expert in chosen)
        hot.learn(0, np.array(sorted(chosen)))
        for out, new in hot.exchanges(0, stays, chosen - stays, chosen):
            stays = stays - {out} | {new}
    assert stays == {3, 7} and hits[True] > 3 * hits[False]
