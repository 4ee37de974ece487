from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.jobs.bench.arrivals import arrival_times


def rng(seed=0):
    return np.random.default_rng(seed)


def test_the_example():
    assert arrival_times(3, 2.0, rng(), "fixed").tolist() == [0.5, 1.0, 1.5]


def test_without_a_rate_all_come_at_once():
    assert arrival_times(4, math.inf, rng()).tolist() == [0.0] * 4


@given(st.integers(0, 50), st.floats(0.01, 1e4), st.floats(1e-3, 100), st.integers(0, 99))
def test_times_ascend_and_end_at_the_asked_rate(count, rate, burstiness, seed):
    times = arrival_times(count, rate, rng(seed), burstiness=burstiness)
    assert len(times) == count
    assert np.isfinite(times).all() and (times >= 0).all() and (np.diff(times) >= 0).all()
    if count:
        assert times[-1] == pytest.approx(count / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_burstiness_says(burstiness):
    gaps = np.diff(arrival_times(20_000, 10.0, rng(), burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_gaps_are_exponential():
    gaps = np.sort(np.diff(arrival_times(5000, 1.0, rng(1))))
    expected = 1 - np.exp(-gaps)
    assert np.abs(expected - np.arange(1, len(gaps) + 1) / len(gaps)).max() < 0.03


def test_a_seed_fixes_the_times():
    assert (arrival_times(9, 3.0, rng(4)) == arrival_times(9, 3.0, rng(4))).all()
    assert (arrival_times(9, 3.0, rng(4)) != arrival_times(9, 3.0, rng(5))).any()
