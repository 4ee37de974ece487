from __future__ import annotations

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.load import Outcome
from moesaic.jobs.bench.measure import (
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    parse_slo,
    spread,
    summarise,
)


def outcome(ttft, gaps, prompt=10, error=None):
    latency = ttft + sum(gaps)
    return Outcome(0.0, ttft, latency, list(gaps), prompt, len(gaps) + 1, error)


def test_a_worked_example():
    done = [outcome(0.1, [0.02, 0.04]), outcome(0.3, [0.01]), outcome(0.2, [])]
    failed = outcome(9.0, [9.0], error="HTTP 500: no")
    summary = summarise([*done, failed], 2.0, percentiles=(50.0,), objectives={"ttft": 250.0, "tpot": 20.0})
    assert (summary.num_completed, summary.num_failed) == (3, 1)
    assert (summary.total_input, summary.total_output) == (30, 6)
    assert summary.request_throughput == 1.5
    assert (summary.output_throughput, summary.total_token_throughput) == (3.0, 18.0)
    assert (summary.num_good, summary.request_goodput) == (1, 0.5)
    assert summary.spreads["ttft"].mean == pytest.approx(200.0)
    assert summary.spreads["tpot"].mean == pytest.approx(20.0)
    assert summary.spreads["itl"].median == pytest.approx(20.0)
    assert summary.spreads["e2el"].percentiles[50.0] == pytest.approx(200.0)


def test_spreads_are_numpys():
    values = np.random.default_rng(0).exponential(size=1000)
    found = spread(list(values), (50.0, 90.0, 99.9))
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())
    assert found.median == found.percentiles[50.0] == pytest.approx(np.median(values))
    assert found.percentiles[99.9] == pytest.approx(np.percentile(values, 99.9))


def test_nothing_is_all_zeros():
    summary = summarise([], 0.0)
    assert summary.request_throughput == summary.output_throughput == 0.0
    assert summary.request_goodput is None
    assert summary.spreads["ttft"].percentiles[99.0] == 0.0


def test_a_boundary_is_good_and_a_single_token_has_no_tpot_to_miss():
    assert summarise([outcome(0.5, [])], 1.0, objectives={"ttft": 500.0, "tpot": 0.001}).num_good == 1
    assert summarise([outcome(0.5, [])], 1.0, objectives={"e2el": 499.0}).num_good == 0


def test_texts_of_options():
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    assert parse_goodput(("ttft:500 tpot:50",)) == parse_goodput(("ttft:500", "tpot:50.0"))
    assert parse_goodput(("ttft:500,e2el:9.5",)) == {"ttft": 500.0, "e2el": 9.5}
    assert parse_goodput(()) == {}
    assert parse_slo("5x-light") == 5.0


@pytest.mark.parametrize(
    ("parse", "text", "flag"),
    [
        (parse_metrics, "ttft,speed", "--percentile-metrics: got 'speed'"),
        (parse_percentiles, "50,x", "--metric-percentiles"),
        (parse_percentiles, "101", "--metric-percentiles"),
        (parse_percentiles, "nan", "--metric-percentiles"),
        (parse_goodput, ("itl:5",), "--goodput: got 'itl:5'"),
        (parse_goodput, ("ttft:-5",), "--goodput"),
        (parse_goodput, ("ttft:5", "ttft:6"), "--goodput: got 'ttft:6'"),
        (parse_slo, "5x", "--slo: got '5x'"),
        (parse_slo, "0x-light", "--slo"),
    ],
)
def test_bad_texts_are_one_line(parse, text, flag):
    with pytest.raises(ConfigError, match=flag):
        parse(text)
