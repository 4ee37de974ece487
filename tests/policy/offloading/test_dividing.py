"""Memory is divided under its cap, for the requests that are there, and not anew at each flip of a load."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.offload import BlockNeeds, Division, DivisionPrices, ExpertReads
from moesaic.policy.offloading.dividing import MOVING_SECONDS, PATIENCE, Dividing, MemorySizes, list_divisions

PRICES = DivisionPrices((1, 4, 16, 64), (0.2, 0.25, 0.4, 1.2), 0.003, layers=48, num_experts=128, top_k=8)
SIZES = MemorySizes(num_experts=128, slot=122_880, place=2560, lines=(32,) * 96, page=4)  # in KiB
DIVISIONS = list_divisions(SIZES, Division(30, 64 * 40), 128)
EACH = 40
"""Blocks of a request of the tests."""


def needs_of(count: int, division: Division) -> BlockNeeds:
    """Requests of which as many run as there are blocks for, and the others wait."""
    running = min(count, division.num_blocks // EACH)
    return BlockNeeds((EACH,) * running, running * EACH, (EACH,) * (count - running), 0)


# ---- the divisions


@given(
    st.integers(2, 40), st.integers(1, 300), st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1),
    st.sampled_from([1, 16, 64]), st.data(),
)  # fmt: skip
def test_no_division_takes_more_than_the_planned_one(
    experts: int, slot: int, place: int, lines: list[int], page: int, data: st.DataObject
) -> None:
    sizes = MemorySizes(experts, -(-slot // page) * page, place, tuple(lines), page)
    planned = Division(data.draw(st.integers(0, experts)), data.draw(st.integers(1, 200)))
    least = data.draw(st.integers(1, planned.num_blocks))
    divisions = list_divisions(sizes, planned, least)
    cap = sizes.count_experts(planned.residents) + sizes.count_cache(planned.num_blocks)
    assert divisions[0] == planned
    for before, after in itertools.pairwise(divisions):
        assert after.residents == before.residents + 1 <= experts
        assert least <= after.num_blocks <= before.num_blocks
        assert sizes.count_experts(after.residents) + sizes.count_cache(after.num_blocks) <= cap
    Dividing(divisions, PRICES)  # their order is the one that it needs


def test_the_blocks_that_fit_are_the_most() -> None:
    sizes = MemorySizes(8, 64, 8, (5, 7), 16)
    for num_bytes in range(240):
        blocks = sizes.blocks_in(num_bytes)
        assert sizes.count_cache(blocks) <= num_bytes < sizes.count_cache(blocks + 1)


@pytest.mark.parametrize(
    "divisions", [[], [Division(2, 5), Division(2, 5)], [Division(1, 5), Division(2, 6)]]
)
def test_divisions_in_another_order_are_refused(divisions: list[Division]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Dividing(divisions, PRICES)


# ---- what is chosen


def test_one_client_gets_nearly_all_for_experts_and_many_get_their_cache() -> None:
    one, many = Dividing(DIVISIONS, PRICES), Dividing(DIVISIONS, PRICES)
    assert one.choose(0.0, BlockNeeds(waiting=(EACH,))) == DIVISIONS[-1]
    assert many.choose(0.0, BlockNeeds(waiting=(EACH,) * 16)).num_blocks >= 16 * EACH
    assert DIVISIONS[-1].residents > 80


def test_skewed_choices_leave_more_to_the_cache() -> None:
    """Where a few experts have all choices, further ones that stay save nothing."""
    dividing = Dividing(DIVISIONS, PRICES)
    dividing.learn(ExpertReads(0.003, (1 / 20,) * 20 + (0.0,) * 108))
    assert dividing.choose(0.0, BlockNeeds(waiting=(EACH,) * 64)).num_blocks >= 64 * EACH


def test_a_request_that_waits_alone_gets_its_blocks_at_once() -> None:
    dividing = Dividing(DIVISIONS, PRICES)
    dividing.choose(0.0, BlockNeeds(waiting=(EACH,)))
    dividing.choose(1.0, BlockNeeds())
    assert dividing.choose(1.1, BlockNeeds(waiting=(1500,))).num_blocks >= 1500


def test_idle_time_counts_for_nothing() -> None:
    dividing = Dividing(DIVISIONS, PRICES)
    dividing.choose(0.0, BlockNeeds(waiting=(EACH,) * 64))
    at_first = dividing.division
    one = BlockNeeds((EACH,), EACH)
    for time in range(100):
        dividing.choose(10.0 * time, one)
        dividing.choose(10.0 * time + 0.01, BlockNeeds())
    assert dividing.division == at_first and dividing.changes <= 1


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_an_admitted_request_keeps_its_room(seed: int) -> None:
    """Whatever comes, the cache holds what runs and no used block is cut off, if any division can."""
    rng, now = random.Random(seed), 0.0
    dividing = Dividing(DIVISIONS, PRICES)
    for _ in range(30):
        now += rng.choice((0.0, 0.3, 4.0, 60.0))
        if not rng.randrange(5):
            hot = sorted((rng.random() ** 4 for _ in range(128)), reverse=True)
            dividing.learn(ExpertReads(rng.choice((1e-5, 0.003, 0.1)), tuple(h / sum(hot) for h in hot)))
        running = tuple(rng.randrange(1, 200) for _ in range(rng.randrange(0, 12)))
        used = sum(running) - (rng.randrange(min(running)) if len(running) > 1 else 0)
        waiting = tuple(rng.randrange(1, 200) for _ in range(rng.randrange(0, 12)))
        end = rng.randrange(used, DIVISIONS[0].num_blocks + 1) if running else 0
        division = dividing.choose(now, BlockNeeds(running, used, waiting, end))
        assert division in DIVISIONS
        assert division.num_blocks >= max(used, end)
        if waiting and not running:
            assert division.num_blocks >= waiting[0]


# ---- loads that flip, in virtual time


@functools.cache
def produce(division: Division, count: int) -> float:
    """Tokens/s of a division that is never left, by the policy's own prices."""
    fixed = Dividing([division], PRICES)
    fixed.choose(0.0, needs_of(count, division))
    assert fixed._rates is not None
    return float(fixed._rates[0])


def run(divisions: Sequence[Division], load: Callable[[float], int]) -> tuple[float, int]:
    """Tokens/s of a server that divides its memory anew, once it knows its load, and all changes.

    Moves cost the time of their reads.
    """
    dividing, now, tokens, step = Dividing(divisions, PRICES), 0.0, 0.0, 0.5
    dividing.choose(now, needs_of(load(0.0), dividing.division))
    settled = None
    while now < 200.0:
        if settled is None and now >= 120.0:
            settled, tokens = now, 0.0
        before, count = dividing.division, load(now)
        division = dividing.choose(now, needs_of(count, before))
        added = max(0, division.residents - before.residents)
        lost = MOVING_SECONDS * (division != before) + added * PRICES.layers * PRICES.read_seconds
        tokens += produce(division, count) * step
        now += step + lost
    assert settled is not None
    return tokens / (now - settled), dividing.changes


@pytest.mark.parametrize("period", [0.5, 2.0])
@pytest.mark.parametrize("counts", [(1, 16), (64, 1), (16, 64), (64, 16), (1, 2), (40, 4)], ids=str)
def test_a_load_that_flips_costs_little_of_the_better_fixed_division(
    counts: tuple[int, int], period: float
) -> None:
    def load(now: float) -> int:
        return counts[int(now / period) % 2]

    tokens, changes = run(DIVISIONS, load)
    best = max(sum(produce(one, count) for count in counts) / 2 for one in DIVISIONS)
    assert tokens >= 0.95 * best, f"{tokens / best:.3f} of the best fixed division, {changes} changes"
    assert changes <= 4


def test_a_load_that_stays_is_followed_both_ways() -> None:
    dividing, now = Dividing(DIVISIONS, PRICES), 0.0
    dividing.choose(now, needs_of(1, dividing.division))
    alone = dividing.division
    for count, wanted in ((16, 16 * EACH), (1, 0), (16, 16 * EACH)):
        for _ in range(240):
            now += 0.25
            dividing.choose(now, needs_of(count, dividing.division))
        assert dividing.division.num_blocks >= wanted
        assert (dividing.division.residents >= alone.residents - 5) == (count == 1)
    assert dividing.changes <= 12


def test_a_burst_waits_for_little_more_than_the_patience() -> None:
    dividing, now = Dividing(DIVISIONS, PRICES), 0.0
    dividing.choose(now, needs_of(1, dividing.division))
    while dividing.division.num_blocks < 10 * EACH and now < 60:
        now += 0.25
        dividing.choose(now, needs_of(16, dividing.division))
    assert now < 3 * PATIENCE
