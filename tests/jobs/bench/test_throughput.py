from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moesaic.commands.bench import measure_engine
from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.request import RequestOutput
from moesaic.jobs.bench.options import ThroughputBench
from moesaic.jobs.bench.throughput import check_fits, measure, print_report
from moesaic.llm import Completion


class FakeLLM:
    """One second per prompt token, ten per output token."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def generate(self, prompts, params):
        assert all(one.ignore_eos for one in params)
        self.calls.append(prompts)
        self.now += sum(map(len, prompts)) + 10.0 * sum(one.max_tokens - 1 for one in params)
        return [
            Completion(prompt, [RequestOutput(0, token_ids=[1] * one.max_tokens)])
            for prompt, one in zip(prompts, params, strict=True)
        ]


def quiet():
    return Console(file=io.StringIO(), width=100)


def test_a_worked_example():
    llm = FakeLLM()
    options = ThroughputBench(num_prompts=4, input_len=10, output_len=6)
    report = measure(llm, options, "fake", 50, quiet(), lambda: llm.now)
    assert (report.prompt_tokens, report.output_tokens) == (40, 24)
    assert (report.prefill_seconds, report.elapsed_time) == (40.0, 240.0)
    assert report.prefill_tokens_per_second == 1.0
    assert report.decode_tokens_per_second == pytest.approx(0.1)
    assert report.requests_per_second == pytest.approx(4 / 240)
    assert json.loads(report.to_json())["tokens_per_second"] == pytest.approx(64 / 240)
    console = quiet()
    print_report(report, console)
    assert "decode tokens/s" in console.file.getvalue()


def test_no_pass_sees_the_prompts_of_another():
    llm = FakeLLM()
    measure(llm, ThroughputBench(num_prompts=9, mix="short"), "fake", 50, quiet(), lambda: llm.now)
    _, prefill, whole = llm.calls
    assert list(map(len, prefill)) == list(map(len, whole))
    assert not {tuple(prompt) for prompt in prefill} & {tuple(prompt) for prompt in whole}


def test_requests_that_do_not_fit_are_refused():
    check_fits(ThroughputBench(input_len=50, output_len=50), 100)
    with pytest.raises(ConfigError, match="up to 800 tokens.*allowed: 799 together"):
        check_fits(ThroughputBench(mix="reasonable"), 799)


@pytest.mark.slow
def test_the_demo_model(tmp_path, capsys):
    options = ThroughputBench(num_prompts=4, input_len=16, output_len=8)
    file = tmp_path / "t.json"
    worker = WorkerConfig(ModelConfig("demo"), trace=str(file))
    assert measure_engine(options, worker, as_json=True) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["prompt_tokens"], report["output_tokens"]) == (64, 32)
    assert report["prefill_tokens_per_second"] > 0
    assert f"the trace is in {file}" in said.err
    events = json.loads(file.read_text())["traceEvents"]
    assert {"attention worker 0"} == {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    steps = [one["args"] for one in events if one["name"] == "step"]
    assert sum(step["prefill"] for step in steps) >= 3 * 64, "of the warm-up, of the prefill pass, of the run"
    assert not list(tmp_path.glob("*.parts"))
