from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.lengths import MIXES, Range, range_around, read_trace
from moesaic.jobs.bench.options import ServeBench, ThroughputBench
from moesaic.jobs.bench.plan import check_lengths, plan_serve
from moesaic.jobs.bench.workload import POOL_TEXT, read_prompts, token_pool

POOL = range(100, 200)


def lengths(items):
    return [(len(item.prompt), item.output_len) for item in items]


def test_random_prompts_have_the_asked_lengths_and_tokens():
    plan = plan_serve(
        ServeBench(num_prompts=20, random_input_len=7, random_output_len=9, num_warmups=2), POOL
    )
    assert lengths(plan.load) == [(7, 9)] * 20
    assert len(plan.warmup) == 2 and plan.light == []
    assert all(token in POOL for item in plan.load for token in item.prompt)
    assert len({tuple(item.prompt) for item in plan.load + plan.warmup}) == 22


@pytest.mark.parametrize("mix", ["short", "medium", "reasonable"])
def test_the_mixes_of_the_papers(mix):
    plan = plan_serve(ServeBench(num_prompts=500, mix=mix), POOL)
    for index, bounds in enumerate(MIXES[mix]):
        drawn = [pair[index] for pair in lengths(plan.load)]
        assert bounds.low <= min(drawn) and max(drawn) <= bounds.high
        assert np.mean(drawn) == pytest.approx((bounds.low + bounds.high) / 2, rel=0.1)


def test_a_range_has_both_ends():
    assert set(Range(1, 3).draw(100, np.random.default_rng(0)).tolist()) == {1, 2, 3}
    assert range_around(100, 0.5) == Range(50, 150)
    assert range_around(1, 1.0) == Range(1, 2)


def test_a_seed_fixes_the_plan():
    options = ServeBench(num_prompts=5, mix="short", request_rate=3.0, slo="5x-light")
    assert plan_serve(options, POOL) == plan_serve(options, POOL)
    assert plan_serve(options, POOL) != plan_serve(replace(options, seed=1), POOL)


def write_trace(path, rows, head="arrival_s,input_tokens,output_tokens"):
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_a_trace_is_replayed(tmp_path):
    file = write_trace(tmp_path / "t.csv", ["10.0,100,20", "14.0,200,40", "12.0,300,60", "99,1,1"])
    options = ServeBench(num_prompts=3, trace=file, trace_scale=2.0, trace_length_scale=0.1, slo="2x-light")
    plan = plan_serve(options, POOL)
    assert [item.arrival for item in plan.load] == [0.0, 1.0, 2.0]
    assert lengths(plan.load) == [(10, 2), (30, 6), (20, 4)]
    assert len(plan.light) == 8


@pytest.mark.parametrize(
    ("rows", "head", "said"),
    [
        (["1,2,3"], "arrival,input_tokens,output_tokens", "lacks the column arrival_s"),
        ([], "arrival_s,input_tokens,output_tokens", "at least one row"),
        (["1,2,3", "1,x,3"], "arrival_s,input_tokens,output_tokens", "line 3: got"),
        (["1,2"], "arrival_s,input_tokens,output_tokens", "line 2: got"),
        (["inf,inf,3"], "arrival_s,input_tokens,output_tokens", "line 2: got"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path, rows, head, said):
    with pytest.raises(ConfigError, match=said):
        read_trace(write_trace(tmp_path / "t.csv", rows, head), 10)


def test_prompts_of_a_dataset(tmp_path):
    file = tmp_path / "d.jsonl"
    rows = [
        {"question": "one", "answer": "x"},
        {"question_id": 81, "turns": ["two", "later"]},
        {"task_id": "x", "prompt": "three", "output_tokens": 5},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    assert read_prompts(file) == [("one", None), ("two", None), ("three", 5)]
    plan = plan_serve(
        ServeBench(num_prompts=4, dataset_path=file, custom_output_len=9, num_warmups=1), range(0)
    )
    assert [(item.prompt, item.output_len) for item in plan.load] == [
        ("one", 9),
        ("two", 9),
        ("three", 5),
        ("one", 9),
    ]
    assert plan.warmup[0].prompt == "two"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: not JSON"),
        ('{"x": 1}', "line 1: no text"),
        ("3", "line 1: no text"),
        ("", "at least one"),
    ],
)
def test_a_bad_dataset_is_one_line(tmp_path, text, said):
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_prompts(file)


def test_requests_that_the_server_cannot_take_are_refused_before_any_is_sent():
    plan = plan_serve(ServeBench(num_prompts=2, random_input_len=70, random_output_len=31), POOL)
    check_lengths(plan.load, 101)
    with pytest.raises(ConfigError, match=r"got a request of 70 \+ 31 tokens; allowed: 100 together"):
        check_lengths(plan.load, 100)


def test_the_alphabet():
    assert token_pool([3, 1, 3]) == [1, 3]
    assert POOL_TEXT.isascii() and len(set(POOL_TEXT.split())) > 500


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_prompts": 0}, "--num-prompts: got 0"),
        ({"request_rate": 0.0}, "--request-rate: got 0.0; allowed: a number above 0"),
        ({"request_rate": float("nan")}, "--request-rate"),
        ({"burstiness": -1.0}, "--burstiness"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"random_range_ratio": 1.5}, "--random-range-ratio: got 1.5; allowed: 0 to 1"),
        ({"mix": "short", "trace": "t"}, "--mix and --trace"),
        ({"mix": "short", "random_input_len": 9}, "--random-input-len and --mix: --mix has its own lengths"),
        ({"trace": "t", "random_output_len": 9}, "--random-output-len and --trace"),
        ({"dataset_path": "d", "random_range_ratio": 0.5}, "--random-range-ratio and --dataset-path"),
        ({"endpoint": "/v1/chat/completions"}, "--endpoint"),
        ({"trace": "t", "request_rate": 1.0}, "--trace-scale"),
        ({"arrivals": "fixed", "burstiness": 2.0}, "--burstiness and --arrivals"),
        ({"goodput": ("ttft:5",), "slo": "5x-light"}, "--goodput and --slo"),
    ],
)
def test_bad_options_are_one_line(settings, said):
    with pytest.raises(ConfigError, match=said):
        ServeBench(**settings)


def test_bad_throughput_options_are_one_line():
    with pytest.raises(ConfigError, match="--output-len: got 0"):
        ThroughputBench(output_len=0)
    with pytest.raises(ConfigError, match="--random-range-ratio"):
        ThroughputBench(random_range_ratio=-0.1)


def test_random_prompts_may_begin_alike():
    options = ServeBench(num_prompts=4, random_input_len=7, random_prefix_len=5)
    prompts = [item.prompt for item in plan_serve(options, POOL).load]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1 < len({tuple(p[5:]) for p in prompts})
