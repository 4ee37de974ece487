from __future__ import annotations

import io
import json
import signal

import numpy as np
import pytest
from rich.console import Console
from tests.support.fake_streaming_server import FakeServer
from tests.test_serve import start

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.agents import make_call, make_prefix, make_scale
from moesaic.jobs.bench.conversations import draw_pauses
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.report import print_report
from moesaic.jobs.bench.serve import run

BLOCK = 16


def quiet():
    return Console(file=io.StringIO(), width=250)


def bench(url, **settings):
    given = {"num_clients": 3, "max_turns": 3, "random_prefix_len": 400, "random_input_len": 20}
    return run(ServeBench(base_url=url, random_output_len=8, **(given | settings)), quiet())


@pytest.mark.slow
def test_turns_of_agents_at_a_real_server(quick_workers):
    server = start()
    try:
        report = bench(server.url, ignore_eos=True, temperature=0.0)
        block = int(server.info.get("block_size", BLOCK))
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        server.process.stdout.close()
    assert [(turn.agent, turn.number) for turn in report.turns] == [
        (a, t) for a in range(3) for t in range(3)
    ]
    assert report.summary.num_failed == 0 and report.errors() == []
    outcomes = {(turn.agent, turn.number): turn.outcome for turn in report.turns}
    cold = outcomes[0, 0]
    assert cold.cached_tokens < 3 * block, "only what the template begins with"
    for agent in range(3):
        first = outcomes[agent, 0]
        assert first.prompt_tokens == pytest.approx(420, rel=0.25)
        assert agent == 0 or first.cached_tokens >= 300, "the shared prefix is found"
        for number in range(1, 3):
            before, after = outcomes[agent, number - 1], outcomes[agent, number]
            assert after.prompt_tokens > before.prompt_tokens + 20
            assert after.cached_tokens >= before.prompt_tokens // block * block
            assert after.cached_tokens < after.prompt_tokens
            assert after.output_tokens == 8
    found = report.to_dict(with_details=True)
    for name in ("input_tokens", "output_tokens"):
        assert sum(kind[name] for kind in found["turns"].values()) == found[f"total_{name}"]
    assert {name: kind["completed"] for name, kind in found["turns"].items()} == {
        "cold": 1,
        "warm": 6,
        "shared": 2,
    }
    for kind in found["turns"].values():
        assert kind["cached_tokens"] + kind["computed_tokens"] == kind["input_tokens"]
    assert found["endpoint"] == "/v1/chat/completions" and found["agents"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_turn_has_the_last_prompt_its_answer_and_a_tool_result():
    with FakeServer(max_model_len=None) as server:
        report = bench(server.url, num_clients=2, max_turns=2, num_warmups=0)
        bodies = server.bodies[2:]
    assert all(body["tool_choice"] == "none" and body["max_tokens"] == 8 for body in bodies)
    assert len({json.dumps(body["tools"]) for body in bodies}) == 1
    assert len({body["messages"][0]["content"] for body in bodies}) == 1, "one system prompt"
    first = bodies[0]["messages"]
    second = next(body["messages"] for body in bodies[1:] if body["messages"][:2] == first)
    [answer, result] = second[2:]
    assert answer["content"] == "a\u2028b" * 8
    assert result["role"] == "tool" and result["tool_call_id"] == answer["tool_calls"][0]["id"]
    names = [tool["function"]["name"] for tool in bodies[0]["tools"]]
    assert answer["tool_calls"][0]["function"]["name"] in names
    console = quiet()
    print_report(report, console)
    assert "shared" in console.file.getvalue() and "computed" in console.file.getvalue()
    assert report.turn_kinds()[0].cached_tokens is None, "this server does not say"


def test_the_first_turn_goes_alone():
    with FakeServer(first=0.05) as server:
        bench(server.url, num_clients=4, max_turns=1, random_prefix_len=50)
        first, *others = server.times[2:]
    assert min(others) - first > 0.05


def test_an_agent_ends_at_its_first_failure():
    with FakeServer() as server:
        report = bench(server.url, num_clients=1, max_turns=3)
        assert report.summary.num_completed == 3
    with FakeServer(fail_after=2) as server:
        report = bench(server.url, num_clients=2, max_turns=3)
    assert (report.summary.num_completed, report.summary.num_failed) == (0, 2)


def test_a_prefix_has_the_asked_length_and_real_tools():
    rng = np.random.default_rng(3)
    prefix = make_prefix(30_000, rng)
    assert 30_000 <= prefix.num_characters < 31_500
    for tool in prefix.tools:
        function = tool["function"]
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
        assert 400 < len(json.dumps(tool)) < 2000
    assert len({tool["function"]["name"] for tool in prefix.tools}) == len(prefix.tools) > 10
    call = make_call(prefix, 4, rng)["function"]
    tool = next(tool for tool in prefix.tools if tool["function"]["name"] == call["name"])
    assert set(json.loads(call["arguments"])) <= set(tool["function"]["parameters"]["properties"])
    assert make_prefix(500, np.random.default_rng(3)) == make_prefix(500, np.random.default_rng(3))


def test_lengths_follow_the_tokens_of_two_prompts():
    scale = make_scale([(1000, 350), (3000, 850)])
    assert (scale.per_character, scale.template_tokens) == (0.25, 100.0)
    assert scale.characters(10) == 40 and scale.prefix_characters(600) == 2000


def test_pauses(tmp_path):
    rng = np.random.default_rng(0)
    options = {"num_clients": 2, "max_turns": 3}
    assert draw_pauses(ServeBench(**options), rng) == [[0.0] * 3] * 2
    fixed = ServeBench(**options, request_rate=0.5, arrivals="fixed")
    assert draw_pauses(fixed, rng) == [[0.0, 2.0, 2.0]] * 2
    random = draw_pauses(ServeBench(num_clients=50, request_rate=0.5), rng)
    assert np.mean([row[1:] for row in random]) == pytest.approx(2.0, rel=0.1)
    file = tmp_path / "t.jsonl"
    lines = [{"timestamp": time, "input_length": 9, "output_length": 2} for time in (0, 1000, 4000)]
    file.write_text("\n".join(map(json.dumps, lines)))
    replayed = draw_pauses(ServeBench(num_clients=20, max_turns=3, trace=file, trace_scale=2.0), rng)
    assert {pause for row in replayed for pause in row} == {0.0, 0.5, 1.5}
    file.write_text(json.dumps(lines[0]))
    with pytest.raises(ConfigError, match="at least two rows"):
        draw_pauses(ServeBench(**options, trace=file), rng)
    file.write_text('{"timestamp": 1}')
    with pytest.raises(ConfigError, match="line 1: got .*input_length"):
        draw_pauses(ServeBench(**options, trace=file), rng)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_clients": 0}, "--num-clients: got 0"),
        ({"max_turns": 2}, "--max-turns: needs --num-clients"),
        ({"num_clients": 1, "num_prompts": 3}, "--num-prompts and --num-clients"),
        ({"num_clients": 1, "slo": "5x-light"}, "--slo and --num-clients"),
        ({"random_prefix_len": -1}, "--random-prefix-len: got -1"),
    ],
)
def test_options_that_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ServeBench(**settings)


def test_conversations_that_are_too_long_are_refused_before_any_is_sent():
    with FakeServer(max_model_len=483) as server:
        with pytest.raises(ConfigError, match=r"400 \+ 3 x \(20 \+ 8\) tokens; allowed: 483"):
            bench(server.url)
        assert server.bodies == []
