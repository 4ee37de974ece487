"""Prices of steps by their rows: the prior, and what was measured."""

from __future__ import annotations

import pytest

from moesaic.policy.scheduling.step_prices import WARM, StepPrices, work_by_rows


def measured(prices: StepPrices, rows: int, seconds: float, times: int = 5) -> None:
    for _ in range(WARM + times):
        prices.record_duration(rows, seconds)


def test_without_measurements_the_prior_counts() -> None:
    prices = StepPrices(lambda rows: 2.0 * rows)
    assert [prices.price(rows) for rows in (1, 5)] == [2.0, 10.0]


def test_the_first_steps_are_recorded_and_do_not_count() -> None:
    prices = StepPrices(lambda rows: 1.0)
    for _ in range(WARM):
        prices.record_duration(3, 99.0)
    assert prices.price(3) == 1.0
    prices.record_duration(3, 0.5)
    assert prices.price(3) == 0.5


def test_a_single_slow_step_changes_nothing() -> None:
    prices = StepPrices(lambda rows: 1.0)
    measured(prices, 4, 0.25)
    prices.record_duration(4, 7.0)
    assert prices.price(4) == 0.25


def test_between_measurements_the_factor_changes_evenly() -> None:
    prices = StepPrices(lambda rows: float(rows))
    measured(prices, 8, 8.0)
    measured(prices, 4, 8.0)
    assert prices.price(1) == 2.0 and prices.price(4) == 8.0
    assert prices.price(6) == pytest.approx(6 * 1.5)
    assert prices.price(8) == 8.0 and prices.price(16) == 16.0


def test_more_rows_read_more_experts_until_all_are_read() -> None:
    work = work_by_rows(100.0, 1000.0, 10, 1)
    steps = [work(rows + 1) - work(rows) for rows in (1, 2, 5, 60)]
    assert steps == sorted(steps, reverse=True) and steps[-1] > 0
    assert work_by_rows(100.0, 0.0, 0, 0)(6) == pytest.approx(200.0)


def test_the_table_grows_with_the_rows_whatever_was_measured() -> None:
    prices = StepPrices(lambda rows: float(rows))
    measured(prices, 2, 4.0)
    measured(prices, 4, 1.0)
    found = prices.table(1, 5).tolist()
    assert found[1] == prices.price(2) == 4.0
    assert found[3] == pytest.approx(4.0 * 2**0.25) and found == sorted(found)
    measured(prices, 4, 64.0, times=20)
    assert prices.table(4, 4).tolist() == [pytest.approx(found[3])]
    prices.refresh()
    assert prices.table(4, 4).tolist() == [prices.price(4)] == [64.0]
