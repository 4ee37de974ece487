"""What is written down of an attention worker and an expert server, without their processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import trace_reader

from moesaic import LLM, SamplingParams
from moesaic.config import ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import TokenBatch
from moesaic.experts import wire
from moesaic.experts.backend import CallPairs
from moesaic.experts.observer import ServerTrace
from moesaic.experts.server import ExpertServer
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.observer import UnobservedWorker
from moesaic.runtime.tracing import StepPieces, WorkerTrace
from moesaic.trace.track import Track
from moesaic.transport.calls import Call, Caller
from moesaic.transport.listening import Listener, connect
from moesaic.transport.local import local_pair

SECRET = b"a secret of the tests"
WIDTH = 4
PATIENCE = 120.0
"""Seconds after which something hangs."""


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "attention-worker-0.1.json"


@pytest.fixture
def track(part: Path, clock: Clock) -> Iterator[Track]:
    made = Track(part, clock)
    yield made
    made.close()


@pytest.fixture
def spans(part: Path) -> Callable[[], list[trace_reader.Span]]:
    """What was written so far."""
    return lambda: trace_reader.rows(trace_reader.part(part))[0].spans


def plan(step: int, *rows: int) -> StepPlan:
    """rows: of each sequence."""
    starts, none = np.concatenate(([0], np.cumsum(rows))), np.zeros(0, dtype=np.int64)
    count = np.zeros(int(starts[-1]), dtype=np.int64)
    batch = TokenBatch(count, count, starts, np.array(rows), np.zeros((len(rows), 1), dtype=np.int64), none)
    return StepPlan(step, batch, none, none, none, none)


def test_answers_cut_a_step_into_layers(track: Track, clock: Clock, spans: Callable[[], Any]) -> None:
    """Two decodes and a chunk of 5 rows. The experts of layer 1 answer at once, those of layer 2 at 11."""
    timeline, step = StepPieces(track), plan(4, 1, 1, 5)
    timeline.begin(step, "step")
    clock.now = 2.0
    timeline.on_dispatch(1, 28, begin=1.0)
    timeline.on_answer(3.0, 3.5)
    clock.now = 5.0
    timeline.on_dispatch(2, 28, begin=4.0)
    clock.now = 6.0
    timeline.end()
    clock.now = 9.0
    timeline.resume(step)
    timeline.on_answer(10.0, 11.0)
    clock.now = 12.0
    timeline.end()
    timeline.on_sampling_started()
    clock.now = 13.0
    timeline.on_tokens_sampled(2)
    rows = {"step": 4, "rows": 7, "decode": 2, "prefill": 5}
    assert [(s.name, s.begin / 1e6, s.end / 1e6, s.args) for s in spans()] == [
        ("layer 1", 0, 3, rows),
        ("dispatch", 1, 2, {"layer": 1, "pairs": 28}),
        ("layer 2", 3.5, 6, rows),
        ("dispatch", 4, 5, {"layer": 2, "pairs": 28}),
        ("to sampler", 11, 12, rows),
        ("sampling", 12, 13, {"rows": 2}),
    ]


def test_a_look_for_answers_that_are_missing_is_no_piece(track: Track, spans: Callable[[], Any]) -> None:
    timeline = StepPieces(track)
    timeline.resume(plan(0, 1))
    timeline.end()
    assert spans() == []
    timeline.on_answer(1.0, 2.0)  # found between steps, for a step that goes on later
    timeline.on_sampling_started()
    timeline.on_tokens_sampled(1)
    assert [span.name for span in spans()] == ["sampling"]


def test_sampling_lies_in_the_last_run(track: Track, clock: Clock, spans: Callable[[], Any]) -> None:
    timeline = StepPieces(track)
    timeline.begin(plan(0, 1), "to sampler")
    clock.now = 1.0
    timeline.on_sampling_started()
    clock.now = 2.0
    timeline.on_tokens_sampled(1)
    timeline.end()
    assert [(span.name, span.begin) for span in spans()] == [("to sampler", 0), ("sampling", 10**6)]


class Doubling:
    """An ExpertBackend that takes three seconds."""

    name = "doubling"
    device_name = ""
    held = {2: [0, 1, 2, 3], 5: [0, 1, 2, 3]}  # noqa: RUF012

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def take(self, wanted: object) -> None: ...

    def keep(self, wanted: object) -> None: ...

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        self.clock.now += 3.0
        for one in parts:
            one.results[one.result_rows] = 2 * one.hidden[one.rows]


class Place:
    """A server that is observed, and clients on their connections."""

    def __init__(self, folder: Path, clock: Clock, track: Track, rule: EnoughPairs) -> None:
        layout = ExpertLayout({2: "a", 5: "b"}, "gate", "up", "down", WIDTH, 2, 4, 2, "float32")
        self.listener = Listener(f"unix:{folder}/server", SECRET)
        scheduler = ExpertServerScheduler(layout.layers, MostTokensFirst(), rule)
        observer = ServerTrace(track)
        self.server = ExpertServer(layout, Doubling(clock), self.listener, scheduler, clock, observer)
        self.callers: list[Caller] = []

    def join(self) -> Caller:
        self.callers.append(connect(self.listener.address, SECRET, "shm", 1 << 20))
        self.until(lambda: self.server.clients == len(self.callers))
        return self.callers[-1]

    def ask(self, caller: Caller, layer: int, experts: list[int]) -> Call:
        """These experts for a row of ones. Returns when the server has taken it in."""
        calls, none = self.server.counters.calls, np.zeros(len(experts), dtype=np.int64)
        call = caller.open(wire.size(1, len(experts), WIDTH, False), len(experts), 4 * WIDTH)
        assert call is not None
        wire.write(call.request, layer, np.array(experts), none, None, np.ones((1, WIDTH), np.float32))
        caller.post(call)
        self.until(lambda: self.server.counters.calls > calls)
        return call

    def until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, "nothing happened"
            self.server.turn(0.001)

    def close(self) -> None:
        self.server.close()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def place(tmp_path: Path, clock: Clock, track: Track) -> Iterator[Place]:
    made = Place(tmp_path, clock, track, EnoughPairs(pairs=6, wait=1e9))
    yield made
    made.close()


def waiting(part: Path) -> list[int]:
    """What was counted so far."""
    return [event["args"]["pairs waiting"] for event in trace_reader.part(part) if event["ph"] == "C"]


def test_a_servers_run_says_whose_pairs_it_computed(
    place: Place, part: Path, spans: Callable[[], Any]
) -> None:
    """Two calls of one client, one of a second, and a third that asks nothing: six pairs of three experts."""
    first, second, _ = place.join(), place.join(), place.join()
    place.ask(first, 2, [0, 1])
    place.ask(second, 2, [1, 1, 3])
    call = place.ask(first, 2, [0])
    place.until(lambda: place.server.counters.runs == 1)
    assert (np.frombuffer(call.answer, dtype=np.float32) == 2).all()
    [span] = spans()
    assert (span.name, span.end - span.begin) == ("layer 2", 3 * 10**6)
    assert span.args == {"pairs": 6, "experts": 3, "clients": 2}
    assert waiting(part) == [2, 5, 6, 0]


def test_the_pairs_of_a_client_that_left_are_counted_no_more(
    place: Place, part: Path, spans: Callable[[], Any]
) -> None:
    first, second, third = place.join(), place.join(), place.join()
    place.ask(first, 5, [1, 2, 3])
    place.ask(second, 2, [1, 2])
    first.close()
    place.until(lambda: place.server.clients == 2)
    assert waiting(part) == [3, 5, 2] and not spans()
    third.close()
    place.until(lambda: place.server.counters.runs == 1)
    [span] = spans()
    assert (span.name, span.args) == ("layer 2", {"pairs": 2, "experts": 2, "clients": 1})
    assert waiting(part)[3:] == [2, 0]


def worker(trace: str | None) -> Any:
    _, theirs = local_pair()
    config = WorkerConfig(ModelConfig("demo", threads=1), trace=trace)
    made, _ = build_worker(WorkerContext(config, theirs, lambda: 0.0))
    return made


def test_without_a_trace_nothing_is_in_place(part: Path) -> None:
    plain = worker(None)
    assert type(plain._observer) is type(plain._executor._observer) is UnobservedWorker
    traced = worker(str(part))
    assert type(traced._observer) is WorkerTrace and traced._executor._observer is traced._observer


@pytest.mark.slow
def test_a_worker_that_does_everything_writes_steps(
    part: Path, spans: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 9 tokens and 4 more: one step of 9 rows, three of 1."""
    settings = WorkerConfig(ModelConfig("demo", threads=1), trace=str(part))
    monkeypatch.setattr("moesaic.llm._worker_config", lambda *_: settings)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    traced = LLM("demo").generate([[*range(5, 14)]], params)
    monkeypatch.undo()
    plain = LLM("demo", threads=1).generate([[*range(5, 14)]], params)
    assert traced[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    [row] = trace_reader.rows(trace_reader.part(part))
    trace_reader.check_nesting(row)
    steps = [(s.args["rows"], s.args["decode"], s.args["prefill"]) for s in row.named("step")]
    assert steps == [(9, 0, 9), (1, 1, 0), (1, 1, 0), (1, 1, 0)]
    assert [span.args for span in row.named("sampling")] == [{"rows": 1}] * 4
    assert {span.name for span in row.spans} == {"schedule", "step", "sampling"}


def test_json_carries_the_file() -> None:
    config = WorkerConfig(ModelConfig("m"), trace="t.json")
    assert WorkerConfig.from_json(config.to_json()) == config
    layout = ExpertLayout({0: "a"}, "gate", "up", "down", 4, 4, 2, 1, "float32")
    server = ExpertServerConfig("m", layout, "unix:x", trace="t.json")
    assert ExpertServerConfig.from_json(server.to_json()).trace == "t.json"


def test_drafted_rows_are_counted_apart(track: Track, spans: Callable[[], Any]) -> None:
    """One decode with three drafted tokens, and one without."""
    timeline, step = StepPieces(track), replace(plan(4, 4, 1), num_draft_tokens=np.array([3, 0]))
    timeline.begin(step, "step")
    timeline.end()
    assert spans()[0].args == {"step": 4, "rows": 5, "decode": 2, "prefill": 0, "drafted": 3}
