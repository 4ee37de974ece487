"""Rows of lanes in a trace: of passes that were made up, and of a worker's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support import trace_reader

from moesaic import LLM
from moesaic.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.messages import Submit
from moesaic.core.offload import Offload
from moesaic.core.request import Request, SamplingParams
from moesaic.offload.passes import Passes
from moesaic.policy.offloading.tasks import Kind, Lane, Task
from moesaic.policy.offloading.timeline import Timeline, run
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.tracing import LaneRows
from moesaic.trace.track import Track
from moesaic.transport.local import local_pair

TASKS = [
    Task(Kind.PRE, Lane.FAST, 0, 1, ()),
    Task(Kind.LOAD_PAGE, Lane.LINK_DOWN, 1, 3, ()),
    Task(Kind.SYNC, Lane.FAST, 0, 1, (0, 1)),
    Task(Kind.POST_WITH_EXPERTS, Lane.FAST, 0, 1, (2,)),
]
"""2, 3, 0 and 1 seconds: `post-attention` is from 3 to 4."""


def test_a_pass_is_written_where_it_was_in_time(tmp_path: Path) -> None:
    """It ended at 10 s and took 4; another one ended at 20 s."""
    file = tmp_path / "attention-worker-1.1.json"
    now = 10.0
    track = Track(file, lambda: now)
    rows = LaneRows(track)
    times = run(TASKS, [2.0, 3.0, 0.0, 1.0])
    rows.write(TASKS, times)
    now = 20.0
    rows.write(TASKS, times)
    track.span("step", 5.0, 11.0)
    track.close()
    worker, fast, down = trace_reader.rows(trace_reader.part(file))
    names = [f"attention worker 1{more}" for more in ("", ": fast compute", ": link down")]
    assert [worker.process, fast.process, down.process] == names
    assert [(one.name, one.begin, one.end) for one in fast.spans] == [
        *(("pre-attention", 6_000_000, 8_000_000), ("post-attention", 9_000_000, 10_000_000)),
        *(("pre-attention", 16_000_000, 18_000_000), ("post-attention", 19_000_000, 20_000_000)),
    ]
    assert [one.args for one in fast.spans[:2]] == [{"pass": 0, "layer": 0, "micro_batch": 1}] * 2
    assert [one.args for one in down.spans] == [{"pass": at, "layer": 1, "page": 3} for at in (0, 1)]
    assert [one.name for one in worker.spans] == ["step"] and worker.pid == os.getpid()


def test_a_worker_with_a_trace_has_rows_for_its_lanes(tmp_path: Path) -> None:
    part = tmp_path / "attention-worker-0.1.json"
    offload = Offload(1 << 30, "cgopipe", micro_batch=1, micro_batches=2, prefill_rows=8)
    config = WorkerConfig(
        ModelConfig("demo", threads=1),
        CacheConfig("8MiB"),
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
        trace=str(part),
        offload=offload,
    )
    ours, theirs = local_pair()
    worker, _ = build_worker(WorkerContext(config, theirs, lambda: 0.0))
    requests = [Request(at, [1, 2, 3], SamplingParams(max_tokens=3, seed=0)) for at in range(2)]
    ours.send(Submit(requests))
    while worker.turn(timeout=0.0):
        pass
    first, *lanes = trace_reader.rows(trace_reader.part(part))
    assert [one.process.partition(": ")[2] for one in lanes] == ["fast compute", "link down"]
    assert {"schedule", "sampling"} <= {span.name for span in first.spans}
    names = [span.name for span in lanes[0].spans]
    assert {"prompt", "pre-attention", "attention", "post-attention"} <= set(names)
    assert {span.args["pass"] for span in lanes[0].spans} == {0, 1, 2}
    assert {span.args["page"] for span in lanes[1].spans} == {0, 1}


def test_passes_tell_whoever_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[Task], Timeline]] = []
    init = Passes.__init__

    def observed(self: Passes, *parts: object) -> None:
        init(self, *parts)  # type: ignore[arg-type]
        self.observe = lambda tasks, times: seen.append((list(tasks), times))

    monkeypatch.setattr(Passes, "__init__", observed)
    offload = Offload(1 << 30, "serial", micro_batch=1, micro_batches=1, prefill_rows=8)
    llm = LLM("demo", threads=1, offload=offload, max_num_seqs=1, kv_cache_memory="8MiB")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert len(seen) == 2
    for tasks, times in seen:
        assert len(tasks) == len(times.starts) == len(times.ends)
        assert all(start <= end for start, end in zip(times.starts, times.ends, strict=True))
    [stats] = [one for one in llm.stats().experts.passes if not one.prefill]
    assert stats.seconds == seen[1][1].makespan
