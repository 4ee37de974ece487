"""A served model that a benchmark drives, and the figures of a run."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moesaic import SamplingParams
from moesaic.cluster.launch import LaunchedEngine, launch
from moesaic.cluster.router import Router
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertServerStats, WorkerStats
from moesaic.core.placement import Placement
from moesaic.kernels import table
from moesaic.models import files, registry

SETTLE = 0.3
"""Seconds without a message after which every process has reported its work."""
LONGEST_SETTLE = 3.0
PATIENCE = 120.0
"""Seconds without a message after which a cluster counts as broken."""


@dataclass
class Run:
    """The time of each token of each request, on a clock that starts with the first request."""

    prompt_tokens: int
    times: list[list[float]]

    @property
    def begun(self) -> float:
        """Seconds until every request had its first token."""
        return max(one[0] for one in self.times)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.begun

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the steady part: every request has begun and none has ended.

        Example: tokens at 1, 2, 3 s and at 2, 3, 4 s: between 2 and 3 s there come two.
        """
        end = min(one[-1] for one in self.times)
        if end <= self.begun:  # the first ended before the last began: all that came later
            end = max(one[-1] for one in self.times)
        count = sum(self.begun < moment <= end for one in self.times for moment in one)
        return count / (end - self.begun)

    @property
    def gaps(self) -> list[float]:
        """Ascending, between two tokens of one request, after all have begun."""
        begun = self.begun
        return sorted(b - a for one in self.times for a, b in pairwise(one) if a >= begun)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of ascending numbers. Example: [1, 2, 3, 4] and 0.5 -> 3."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class Counters:
    """The counters of all processes at one moment."""

    worker: WorkerStats
    servers: tuple[ExpertServerStats, ...]
    time: float


@dataclass(frozen=True)
class Spent:
    """The difference of the counters between two moments."""

    seconds: float
    pairs: int
    expert_runs: int
    worker_waiting: float
    """Seconds in which attention workers had nothing to do but wait for experts, summed over all workers."""
    server_busy: tuple[float, ...]
    """Busy seconds of each expert server."""
    resent_pairs: int
    failovers: int
    runs: int
    """Of the attention workers."""
    partial_runs: int
    """Those that computed only some of their worker's rows."""

    @property
    def rows_per_expert_run(self) -> float:
        return self.pairs / max(1, self.expert_runs)


def spent(before: Counters, after: Counters) -> Spent:
    def grown(name: str) -> list[float]:
        return [
            getattr(b, name) - getattr(a, name) for a, b in zip(before.servers, after.servers, strict=True)
        ]

    old, new = before.worker.experts, after.worker.experts
    return Spent(
        seconds=after.time - before.time,
        pairs=int(sum(grown("pairs"))),
        expert_runs=int(sum(grown("expert_runs"))),
        worker_waiting=new.waiting_seconds - old.waiting_seconds,
        server_busy=tuple(grown("busy_seconds")),
        resent_pairs=new.resent_pairs - old.resent_pairs,
        failovers=new.failovers - old.failovers,
        runs=after.worker.steps - before.worker.steps,
        partial_runs=after.worker.partial_runs - before.worker.partial_runs,
    )


@dataclass
class Served:
    """One process or a cluster that is ready. One thread drives it."""

    name: str
    launched: LaunchedEngine
    times: dict[int, list[float]] = field(default_factory=dict)
    """Request -> times of its tokens, on the monotonic clock."""
    open: set[int] = field(default_factory=set)

    def until_ready(self) -> None:
        while self.launched.engine.info is None:
            self.take(PATIENCE)
            if self.launched.engine.dead is not None:
                raise SystemExit(f"{self.name}: {self.launched.engine.dead}")

    def submit(self, prompt: list[int], new: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        number = self.launched.engine.submit(prompt, params)
        self.times[number] = []
        self.open.add(number)
        return number

    def take(self, timeout: float) -> bool:
        """Handle one message, if one has arrived."""
        message = self.launched.connection.receive(timeout)
        if message is None:
            return False
        now = time.monotonic()
        for output in self.launched.engine.receive(message):  # type: ignore[arg-type]
            self.times[output.request_id] += [now] * len(output.token_ids)
            if output.finished:
                self.open.discard(output.request_id)
        return True

    def run(self, prompts: list[list[int]], new: int) -> Run:
        """Run all requests at once until the last one has ended."""
        started = time.monotonic()
        numbers = [self.submit(prompt, new) for prompt in prompts]
        while self.open:
            if not self.take(PATIENCE):
                raise SystemExit(f"{self.name}: no message for {PATIENCE:.0f} s")
        times = [[moment - started for moment in self.times.pop(number)] for number in numbers]
        return Run(sum(map(len, prompts)), times)

    def counters(self) -> Counters:
        """The counters as every process reported them last."""
        supervisor = self.launched.supervisor
        processes = [] if supervisor is None else supervisor.status()
        servers = tuple(one.stats for one in processes if one.role == "expert server")
        connection = self.launched.connection
        worker = connection.stats() if isinstance(connection, Router) else self.launched.engine.stats().worker
        return Counters(worker, servers, time.monotonic())

    def measured(self, prompts: list[list[int]], new: int) -> tuple[Run, Spent]:
        """A run, and the work of every process in it. Seconds are those of the run alone."""
        before = self.counters()
        run = self.run(prompts, new)
        after = self.settled()
        ended = max(one[-1] for one in run.times)
        return run, spent(before, Counters(after.worker, after.servers, before.time + ended))

    def settled(self) -> Counters:
        """The counters, once none of them changes any more."""
        last, since = self.counters(), time.monotonic()
        deadline = since + LONGEST_SETTLE
        while time.monotonic() < min(since + SETTLE, deadline):
            self.take(0.05)
            now = self.counters()
            if (now.worker, now.servers) != (last.worker, last.servers):
                last, since = now, time.monotonic()
        return last

    def pid(self, name: str) -> int:
        """The process id of a process by the supervisor's name for it, such as "expert server 0"."""
        assert self.launched.supervisor is not None
        return next(one.pid for one in self.launched.supervisor.status() if one.name == name and one.pid)

    def pin(self, cores: Sequence[int]) -> None:
        """Pin attention worker i and expert server i, with all of their threads, to core i. They
        are rank i."""
        assert self.launched.supervisor is not None
        for one in self.launched.supervisor.status():
            for thread in Path(f"/proc/{one.pid}/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), {cores[one.number % len(cores)]})


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def halves(model: str, folder: Path) -> Path:
    """A placement file: server 0 holds the first half of each layer's experts, server 1 the second."""
    layout = layout_of(model)
    placement = Placement.from_stages(layout.layers, layout.num_experts, [(0, 1)], model=layout.fingerprint)
    file = folder / f"halves-{layout.fingerprint}.json"
    file.write_text(placement.to_json())
    return file


def layout_of(model: str) -> ExpertLayout:
    return registry.expert_layout(files.resolve(model, None), table.pick("cpu", "auto"))


@contextmanager
def serving(
    name: str,
    model: str,
    threads: int,
    cluster: ClusterConfig | None = None,
    max_num_seqs: int = 128,
    **scheduler: Any,
) -> Iterator[Served]:
    """A served model that is ready until the context ends. threads: of each process. scheduler: more
    settings."""
    worker = WorkerConfig(
        ModelConfig(model, threads=threads, max_model_len=512),
        CacheConfig(enable_prefix_caching=False),
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, **scheduler),
    )
    with launch(worker, cluster, seed=0) as launched:
        served = Served(name, launched)
        served.until_ready()
        yield served


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number over the rounds."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="disaggregation-")


Measure = Callable[[Served], dict[str, float]]
