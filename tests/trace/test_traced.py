"""What is written down of an attention worker and an expert server, without their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import trace_reader

from moesaic import LLM, SamplingParams
from moesaic.config import ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import TokenBatch
from moesaic.experts.backend import CallPairs
from moesaic.experts.tracing import TracedBackend, TracedExpertScheduler
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.policy.scheduling.schedulers.expert_server import Enough
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.runtime.build import build_worker
from moesaic.runtime.executor import Executor
from moesaic.runtime.tracing import StepTrace, TracedExecutor, TracedScheduler
from moesaic.trace.track import Track
from moesaic.transport.local import local_pair


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
    timeline, step = StepTrace(track), plan(4, 1, 1, 5)
    timeline.begin(step, "step")
    clock.now = 2.0
    timeline.dispatched(1, 28, begin=1.0)
    timeline.answered(3.0, 3.5)
    clock.now = 5.0
    timeline.dispatched(2, 28, begin=4.0)
    clock.now = 6.0
    timeline.end()
    clock.now = 9.0
    timeline.resume(step)
    timeline.answered(10.0, 11.0)
    clock.now = 12.0
    timeline.end()
    with timeline.sampling(2):
        clock.now = 13.0
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
    timeline = StepTrace(track)
    timeline.resume(plan(0, 1))
    timeline.end()
    assert spans() == []
    timeline.answered(1.0, 2.0)  # found between steps, for a step that goes on later
    with timeline.sampling(1):
        pass
    assert [span.name for span in spans()] == ["sampling"]


def test_sampling_lies_in_the_last_run(track: Track, clock: Clock, spans: Callable[[], Any]) -> None:
    timeline = StepTrace(track)
    timeline.begin(plan(0, 1), "to sampler")
    clock.now = 1.0
    with timeline.sampling(1):
        clock.now = 2.0
    timeline.end()
    assert [(span.name, span.begin) for span in spans()] == [("to sampler", 0), ("sampling", 10**6)]


class Doubling:
    """An Arithmetic that takes three seconds."""

    name = "doubling"
    held = {2: [0, 1]}  # noqa: RUF012

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.told: list[object] = []

    def take(self, wanted: object) -> None:
        self.told.append(("take", wanted))

    def keep(self, wanted: object) -> None:
        self.told.append(("keep", wanted))

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        self.clock.now += 3.0
        for one in parts:
            one.out[one.lines] = 2 * one.hidden[one.rows]


def of_one_row(experts: list[int]) -> CallPairs:
    """A call that wants these experts for a row of ones."""
    count = len(experts)
    hidden, out = np.ones((1, 4), dtype=np.float32), np.zeros((count, 4), dtype=np.float32)
    return CallPairs(
        hidden, np.zeros(count, dtype=np.int32), np.array(experts, np.int32), out, np.arange(count)
    )


def test_a_servers_run_says_whose_pairs_it_computed(
    track: Track, clock: Clock, part: Path, spans: Callable[[], Any]
) -> None:
    """Two calls of client 7 and one of client 8: six pairs of three experts."""
    service = TracedExpertScheduler(track, [2, 5], MostTokensFirst(), Enough())
    inner = Doubling(clock)
    arithmetic = TracedBackend(inner, service, track)
    parts = [of_one_row([0, 1]), of_one_row([1, 1, 3]), of_one_row([0])]
    for call, (client, mine) in enumerate(zip((7, 8, 7), parts, strict=True)):
        service.arrived(call, client, 2, mine.experts, 0.0)
    run = service.next_run(0.0)
    assert run is not None and [call for call, _ in run.parts] == [0, 1, 2]
    arithmetic.run(2, parts)
    assert all((mine.out == 2).all() for mine in parts)
    [span] = spans()
    assert (span.name, span.end - span.begin) == ("layer 2", 3 * 10**6)
    assert span.args == {"pairs": 6, "experts": 3, "clients": 2}
    counted = [event["args"]["pairs waiting"] for event in trace_reader.part(part) if event["ph"] == "C"]
    assert counted == [2, 5, 6, 0]
    arithmetic.take({2: [1]})
    arithmetic.keep({2: [0]})
    assert inner.told == [("take", {2: [1]}), ("keep", {2: [0]})]
    assert (arithmetic.name, arithmetic.held) == ("doubling", {2: [0, 1]})


def test_a_client_that_left_is_forgotten(track: Track) -> None:
    service = TracedExpertScheduler(track, [0], MostTokensFirst(), Enough())
    service.arrived(0, 7, 0, np.array([1]), 0.0)
    service.client_left(7)
    service.arrived(1, 8, 0, np.array([1]), 0.0)
    run = service.next_run(0.0)
    assert run is not None and service.served_clients == 1
    assert service._owner == {}


def worker(trace: str | None) -> Any:
    _, theirs = local_pair()
    config = WorkerConfig(ModelConfig("demo", threads=1), trace=trace)
    made, _ = build_worker(config, theirs, lambda: 0.0)
    return made


def test_without_a_trace_nothing_is_in_place(part: Path) -> None:
    plain = worker(None)
    assert (type(plain._executor), type(plain._scheduler)) == (Executor, LockstepScheduler)
    traced = worker(str(part))
    assert (type(traced._executor), type(traced._scheduler)) == (TracedExecutor, TracedScheduler)


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
