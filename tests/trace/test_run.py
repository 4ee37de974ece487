"""Traces of real clusters, as a person would read them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.test_identity import workload
from tests.support import trace_reader
from tests.support.cluster_driver import Cluster
from tests.support.trace_reader import Row, Span

from moesaic.cluster.launch import launch
from moesaic.commands import cli
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.trace.parts import parts_folder

pytestmark = pytest.mark.usefixtures("quick_workers")
LAYERS = list(range(6))
"""Of the demo; all have experts."""
TOP_K = 4
NAMES = ["attention worker 0", "attention worker 1", "expert server 0", "expert server 1"]


@contextmanager
def traced(trace: Path, min_replicas: int = 1, **scheduler: Any) -> Iterator[Cluster]:
    """Two attention workers and two expert servers."""
    settings = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, **scheduler)
    worker = WorkerConfig(ModelConfig("demo", threads=1), CacheConfig("32MiB"), settings, trace=str(trace))
    shape = ClusterConfig(attention_workers=2, expert_servers=2, min_replicas=min_replicas)
    with launch(worker, shape, seed=0) as launched:
        yield Cluster(launched)


def read(trace: Path) -> list[Row]:
    """The rows, none of which a viewer would show otherwise than it is."""
    found = trace_reader.rows(trace_reader.joined(trace))
    for row in found:
        trace_reader.check_nesting(row)
    return found


def pieces(worker: Row, step: int) -> list[Span]:
    """Of one step, in their order."""
    return [span for span in worker.spans if span.args.get("step") == step]


def questions(worker: Row) -> dict[int, list[Span]]:
    """Layer -> from when a step began to ask its experts until the step went on."""
    found: dict[int, list[Span]] = {layer: [] for layer in LAYERS}
    for step in {span.args["step"] for span in worker.layers}:
        for piece, after in pairwise(pieces(worker, step)):
            [sent] = [one for one in worker.named("dispatch") if piece.begin <= one.begin < piece.end]
            found[sent.args["layer"]].append(Span("question", sent.begin, after.begin, sent.args))
    return found


def rows_of_a_run(trace: Path, **settings: Any) -> tuple[list[Row], int]:
    """Of two workers and two servers, and how many pairs were sent again."""
    with traced(trace, **settings) as served:
        served.submit(*workload(8, 24))
        served.finish()
        resent = served.supervisor.report().counters.resent_pairs
    rows = read(trace)
    assert [row.process for row in rows] == NAMES
    return rows, resent


@pytest.mark.slow
@pytest.mark.parametrize("inflight", [1, 2])
def test_steps_and_the_experts_they_wait_for(tmp_path: Path, inflight: int) -> None:
    rows, resent = rows_of_a_run(tmp_path / "t.json", inflight_batches=inflight)
    workers, servers = rows[:2], rows[2:]
    for worker in workers:
        steps = sorted({span.args["step"] for span in worker.layers})
        assert steps == list(range(len(steps))) != []
        for step in steps:
            names = [span.name for span in pieces(worker, step)]
            assert names == [*(f"layer {layer}" for layer in LAYERS), "to sampler"]
        assert len(worker.named("sampling")) == len(steps)
        assert worker.named("wait")
        assert {layer for wait in worker.named("wait") for layer in wait.args["layers"]} <= set(LAYERS)
        assert {piece.args["prefill"] for piece in worker.layers} != {0}
        assert all(one.args["pairs"] % TOP_K == 0 for one in worker.named("dispatch"))
    assert all({span.layer for span in server.layers} == set(LAYERS) for server in servers)
    if resent:
        pytest.skip("the machine was so busy that pairs were sent again")
    asked = [questions(worker) for worker in workers]
    for server in servers:
        for run in server.layers:
            assert run.layer is not None
            inside = [
                any(one.begin <= run.begin and run.end <= one.end for one in mine[run.layer])
                for mine in asked
            ]
            assert sum(inside) >= run.args["clients"] >= 1
    dispatched = sum(one.args["pairs"] for worker in workers for one in worker.named("dispatch"))
    assert sum(run.args["pairs"] for server in servers for run in server.layers) == dispatched


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["barrier", "async"])
def test_barriers_are_to_be_seen(tmp_path: Path, schedule: str) -> None:
    """With them workers stand at the gate of each step and servers answer both at once."""
    rows, resent = rows_of_a_run(tmp_path / "t.json", schedule=schedule)
    workers, servers = rows[:2], rows[2:]
    for row in rows:
        assert {span.layer for span in row.layers} == set(LAYERS)
    for worker in workers:
        assert worker.named("to sampler") and worker.named("sampling")
        assert bool(worker.named("gate")) == (schedule == "barrier")
    dispatched = sum(one.args["pairs"] for worker in workers for one in worker.named("dispatch"))
    computed = sum(run.args["pairs"] for server in servers for run in server.layers)
    assert computed == dispatched or resent
    if schedule == "barrier":
        assert all(max(run.args["clients"] for run in server.layers) == 2 for server in servers)
    else:
        merged = [span.args["rows"] for worker in workers for span in worker.layers]
        assert len(set(merged)) > 2  # batches are made anew at every layer


@pytest.mark.slow
def test_a_killed_server_leaves_all_that_it_wrote(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    with traced(trace, min_replicas=2) as served:
        part = parts_folder(trace) / "expert-server-0.1.json"

        def computed() -> set[int | None]:
            return {span.layer for row in trace_reader.rows(trace_reader.part(part)) for span in row.layers}

        served.connected()
        served.submit(*workload(6, 64))
        served.until(lambda: served.running.tokens > 60 and computed() == set(LAYERS))
        pid = served.pid("expert server 0")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        served.finish()
        [left] = trace_reader.rows(trace_reader.part(part))
    rows = read(trace)
    [row] = [row for row in rows if row.pid == pid]
    assert row == left
    assert row.process == "expert server 0"
    assert {span.layer for span in row.layers} == set(LAYERS)
    assert max(span.end for span in row.spans) <= (killed + 1) * 1e6
    [other] = [row for row in rows if row.process == "expert server 1"]
    assert max(span.end for span in other.spans) > max(span.end for span in row.spans)


@pytest.mark.slow
def test_the_command_says_where_the_trace_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, trace = tmp_path / "in.jsonl", tmp_path / "t.json"
    body = {"model": "demo", "prompt": "def f", "max_tokens": 8}
    lines.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    command = [
        "run-batch",
        "-i",
        str(lines),
        "-o",
        str(tmp_path / "out"),
        "--model",
        "demo",
        "--threads",
        "1",
    ]
    said = f"moesaic: the trace is in {trace}: open it at https://ui.perfetto.dev\n"
    assert cli.main([*command, "--trace", str(trace)]) == 0
    assert said in capsys.readouterr().err
    assert [row.process for row in read(trace)] == ["attention worker 0"]
    assert cli.main([*command, "--trace", str(trace)]) == 0  # nothing is left to do
    assert said not in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "nowhere" / "t.json"
    assert cli.main(["serve", "demo", "--port", "0", "--trace", str(trace)]) == 2
    told = f"moesaic: --trace: got '{trace}'; allowed: a file to write into (No such file or directory)\n"
    assert capsys.readouterr().err == told
