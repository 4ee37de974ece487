"""The size of chunks of prompts, by the price of steps, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.scheduling.prompt_rows import GRAIN, MOST_COST, QUIET, AllPromptRows, PricedPromptRows
from moesaic.policy.scheduling.step_prices import work_by_rows

MOST = 2048
AIM = 0.2
PRIOR = work_by_rows(1e8, 9e8, 64, 8)


def run(
    device: Callable[[int], float], steps: int = 20, answers: int = 4, aim: float = AIM
) -> tuple[PricedPromptRows, list[int]]:
    """Prompts without an end on a device with such prices. Returns the policy and the sizes of its chunks."""
    policy, chunks = PricedPromptRows(aim, PRIOR, MOST), []
    for _ in range(steps):
        chunks.append(policy.limit(MOST - answers, answers))
        rows = chunks[-1] + answers
        policy.record_step(rows, device(rows))
    return policy, chunks


def by_prior(seconds: float) -> Callable[[int], float]:
    """A device as the prior says, whose full step takes so long."""
    return lambda rows: seconds * PRIOR(rows) / PRIOR(MOST)


def test_without_an_aim_a_step_takes_all_that_it_has_room_for() -> None:
    assert AllPromptRows().limit(1234, 5) == 1234


@pytest.mark.parametrize("answers", [0, 4])
def test_steps_end_within_the_aim(answers: int) -> None:
    device, aim = by_prior(1.5), AIM if answers else QUIET * AIM
    policy, chunks = run(device, answers=answers)
    assert 0.8 * aim <= device(chunks[-1] + answers) <= aim
    assert policy.limit(40, answers) == 40


def test_a_fast_device_takes_full_steps() -> None:
    assert run(by_prior(0.15))[1][-1] == MOST - 4


def test_chunks_of_a_slow_device_stay_as_large_as_is_cheap() -> None:
    device = by_prior(60.0)
    chunk = run(device)[1][-1]
    full_price = device(MOST) / MOST
    assert device(chunk) / chunk <= MOST_COST * full_price < device(chunk - GRAIN) / (chunk - GRAIN)
    assert chunk < MOST / 2


def test_the_first_chunk_is_small_since_no_price_is_known() -> None:
    assert run(by_prior(0.01))[1][0] == run(by_prior(60.0))[1][-1]


def test_chunks_shrink_where_attention_makes_them_dear() -> None:
    policy, chunks = run(by_prior(1.0))
    for _ in range(5):
        rows = policy.limit(MOST, 4)
        policy.record_step(rows, 1.5 * by_prior(1.0)(rows))  # a long context
    assert policy.limit(MOST, 4) < chunks[-1]


def test_measured_prices_decide_which_chunks_are_cheap() -> None:
    """On a device whose small chunks cost no more a token, chunks become as small as the aim asks for."""
    policy = PricedPromptRows(AIM, PRIOR, MOST)
    for rows in [2**bits - 1 for bits in range(5, 12)] * 6:
        policy.record_step(rows, 0.002 * rows)
    assert 64 <= policy.limit(MOST, 4) <= AIM / 0.002


@given(st.randoms(use_true_random=False), st.sampled_from([1.0, 3.0, 60.0]))
def test_a_busy_machine_does_not_make_chunks_jump(rng: random.Random, seconds: float) -> None:
    """Steps take up to a third more or less than they should, of all sizes."""
    policy, device, chunks = PricedPromptRows(AIM, PRIOR, MOST), by_prior(seconds), []
    for _ in range(60):
        rows = policy.limit(MOST, rng.choice((0, 4)))
        policy.record_step(rows, device(rows) * rng.uniform(0.75, 1.33))
        chunks.append(policy._least())
    quiet = PricedPromptRows(AIM, PRIOR, MOST)._least()
    assert all(0.5 * quiet <= chunk <= 1.5 * quiet for chunk in chunks)


@given(
    st.lists(st.tuples(st.integers(1, MOST), st.floats(0, 1e4))),
    st.integers(1, MOST),
    st.integers(0, 64),
    st.floats(1e-9, 1e3),
    st.integers(1, MOST),
)
def test_a_prompt_always_goes_on(
    steps: list[tuple[int, float]], room: int, answers: int, aim: float, most_rows: int
) -> None:
    policy = PricedPromptRows(aim, PRIOR, most_rows)
    for rows, seconds in steps:
        policy.record_step(rows, seconds)
    assert 1 <= policy.limit(min(room, most_rows), answers) <= room
