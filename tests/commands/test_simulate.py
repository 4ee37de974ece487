from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from moesaic.commands import cli
from moesaic.commands.simulate import Trace

SCENARIO = """
model = "demo"
duration = 1.0
warm_up = 0.2
devices = { source = "made up", attention = { points_ms = [[8, 1]] }, experts = { points_ms = [[8, 1]] }, \
link = { latency_us = 10, gb_per_s = 1 } }
objectives = { ttft_ms = 500, itl_ms = 50 }
workers = { count = 2 }
servers = { count = 2 }
placement = { min_replicas = 2 }
schedule = { kind = "async" }
workload = { rate = 40, prompt = [3, 9], answer = [4, 12] }
[[faults]]
at = 0.5
server = 1
back = 0.3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return str(path)


def test_the_report_has_what_was_measured(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", file]) == 0
    text = capsys.readouterr().out
    for part in (
        "demo, schedule async, 0.8 simulated seconds",
        "throughput",
        "goodput",
        "time to first token",
    ):
        assert part in text
    for part in ("worker 1", "server 0", "server 1 dies", "server 1 is back", "figures: made up"):
        assert part in text


def test_json_picture_trace_and_changes(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, trace = tmp_path / "plot.svg", tmp_path / "trace.json"
    line = ["simulate", file, "--json", "--plot", str(plot), "--trace", str(trace)]
    assert cli.main([*line, "--set", "workers.count=3", "--set", "schedule.kind=lockstep"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == "lockstep" and len(found["utilisation"]) == 5
    assert found["throughput"] == pytest.approx(found["tokens"] / 0.8)
    assert found["completed"] > 10 and 0 < found["good_share"] <= 1
    texts = [text.text for text in ET.fromstring(plot.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    for part in ("Generated tokens over time", "tokens/s", "Latencies", "ms", "seconds"):
        assert part in texts
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"attention worker 0", "attention worker 1", "attention worker 2", "expert server 0"} | {
        "expert server 1"
    }
    runs = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in runs} >= {"segment 0", "layer 0"}
    assert all(event["dur"] == 1000 for event in runs if event["name"].startswith("segment"))


def test_a_wrong_field_is_one_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", file, "--set", "workers.count=none"]) == 2
    error = capsys.readouterr().err
    assert "workers.count: got 'none'; allowed: an integer of at least 1" in error
    assert len(error.strip().splitlines()) == 1


def test_a_model_that_is_not_there(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", file, "--set", "model=gpt-9"]) == 2
    assert "model: got 'gpt-9'; allowed: a directory with config.json" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", file, "--plot", "/nowhere/plot.svg"]) == 2
    assert "--plot: got '/nowhere/plot.svg'; allowed: a file to write into" in capsys.readouterr().err


def test_spans_are_whole_microseconds() -> None:
    trace = Trace()
    trace.span("expert server 0", "layer 3", 1.0000019, 1.0000051, {"pairs": 8})
    event = json.loads(trace.text())["traceEvents"][-1]
    assert (event["ts"], event["dur"], event["args"]) == (1000001, 4, {"pairs": 8})
