"""A real cluster of processes, driven from a test through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from moesaic import SamplingParams
from moesaic.cluster.launch import LaunchedEngine, launch
from moesaic.cluster.router import Router
from moesaic.cluster.supervisor import Supervisor
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ModelConfig,
    QueueConfig,
    SchedulerConfig,
    WorkerConfig,
)
from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import TokenLogprob
from moesaic.trace.options import RecordConfig

PATIENCE = 120.0
"""Seconds after which a test counts as hanging, also on a busy machine."""

Answer = tuple[list[int], list[float]]
"""Token ids, and the log-probability of each token."""


@dataclass
class Running:
    """Requests in flight."""

    answers: dict[int, Answer] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    """Request -> times of its tokens."""
    unfinished: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests so far."""
        return sum(len(tokens) for tokens, _ in self.answers.values())

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens of one request, in seconds."""
        gaps = [b - a for times in self.times.values() for a, b in pairwise(times)]
        return max(gaps, default=0.0)


class Cluster:
    """A launched cluster that serves."""

    def __init__(
        self, launched: LaunchedEngine, begun: Callable[[Supervisor], None] = lambda _: None
    ) -> None:
        """begun: called once the processes were started, before all of them serve."""
        assert launched.supervisor is not None
        self.supervisor: Supervisor = launched.supervisor
        self._launched = launched
        self.running = Running()
        begun(self.supervisor)
        while launched.engine.info is None:
            self.pump(PATIENCE)
            if launched.engine.dead is not None:
                raise ConnectionLost(launched.engine.dead)

    def pid(self, name: str) -> int:
        """The process id of a process by the supervisor's name for it, such as "expert server 0"."""
        [pid] = [member.pid for member in self.supervisor.status() if member.name == name]
        assert pid is not None
        return pid

    @property
    def router(self) -> Router:
        """What the engine is connected to."""
        assert isinstance(self._launched.connection, Router)
        return self._launched.connection

    @property
    def stats(self) -> WorkerStats:
        """The last statistics of all workers. They come a moment after the tokens that they count."""
        return self._launched.engine.stats().worker

    @property
    def broken_off(self) -> int:
        """Servers whose connections broke while rows were outstanding. Servers that a client gave up because
        of a timeout are left out, since they or the whole machine may have paused."""
        counters = self.supervisor.report().counters
        return counters.failovers - counters.silent_failovers

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Handles the engine's messages until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen: {self.supervisor.report()}"
            self.take(0.02)

    def connected(self) -> None:
        """Waits until every attention worker is connected to every expert server. Serving does not wait for
        that."""

        def all_met() -> bool:
            found = self.supervisor.status()
            workers = sum(member.role == "attention worker" for member in found)
            return all(member.stats.clients == workers for member in found if member.role == "expert server")

        self.until(all_met)

    def submit(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[int]:
        """Submits requests. Returns their numbers, which are in order, from 0 on."""
        numbers = []
        for prompt, one in zip(prompts, params, strict=True):
            number = self._launched.engine.submit(prompt, one)
            self.running.answers[number] = ([], [])
            self.running.times[number] = []
            self.running.unfinished.add(number)
            numbers.append(number)
        return numbers

    def cancel(self, number: int) -> None:
        """Cancels a request. Its tokens so far stay among the answers."""
        self._launched.engine.cancel(number)
        self.running.unfinished.discard(number)

    def forget(self) -> None:
        """Forgets the answers of all requests, which have ended."""
        assert not self.running.unfinished
        self.running = Running()

    def pump(self, timeout: float) -> None:
        """Waits for one message of the workers."""
        assert self.take(timeout), f"the cluster is silent: {self.supervisor.status()}"

    def take(self, timeout: float) -> bool:
        """Handles one message of the workers, if one has arrived."""
        message = self._launched.connection.receive(timeout)
        if message is None:
            return False
        for output in self._launched.engine.receive(message):  # type: ignore[arg-type]
            tokens, logprobs = self.running.answers[output.request_id]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or [] if isinstance(entry, TokenLogprob)]
            self.running.times[output.request_id].append(time.monotonic())
            if output.finished:
                self.running.unfinished.discard(output.request_id)
        return True

    def finish(self, disturb: Callable[[int], None] = lambda tokens: None) -> list[Answer]:
        """Runs until every request has ended. `disturb` gets the number of tokens after each message."""
        while self.running.unfinished:
            self.pump(PATIENCE)
            disturb(self.running.tokens)
        return [self.running.answers[number] for number in sorted(self.running.answers)]


@contextmanager
def cluster(
    model: str = "demo",
    *,
    attention_workers: int = 1,
    expert_servers: int = 2,
    min_replicas: int = 1,
    redundant_experts: int = 0,
    kernels: str = "auto",
    device: str = "auto",
    max_num_batched_tokens: int = 64,
    schedule: str = "lockstep",
    queue_policy: str = "defrag",
    inflight_batches: int = 1,
    combine: str = "exact",
    relay: str = "auto",
    replica_timeout: float | None = None,
    kv_cache_memory: str = "32MiB",
    kv_cache_dtype: str = "auto",
    enable_prefix_caching: bool = True,
    prefix_cache_dir: str | None = None,
    threads: int | None = 1,
    max_model_len: int | None = None,
    queues: QueueConfig = QueueConfig(),
    speculative_config: str | None = None,
    record: RecordConfig = RecordConfig(),
    server_memory: int | None = None,
    begun: Callable[[Supervisor], None] = lambda _: None,
    **more: Any,
) -> Iterator[Cluster]:
    """A cluster that serves until the context ends. more: further settings of ClusterConfig. begun: see
    `Cluster`."""
    worker = WorkerConfig(
        ModelConfig(model, threads=threads, kernels=kernels, max_model_len=max_model_len, device=device),  # type: ignore[arg-type]
        CacheConfig(
            kv_cache_memory,
            kv_cache_dtype,  # type: ignore[arg-type]
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_dir=prefix_cache_dir,
        ),
        SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            schedule=schedule,  # type: ignore[arg-type]
            inflight_batches=inflight_batches,
            queue_policy=queue_policy,  # type: ignore[arg-type]
            combine=combine,  # type: ignore[arg-type]
            relay=relay,  # type: ignore[arg-type]
            replica_timeout=replica_timeout,
            speculative_config=speculative_config,
        ),
        queues=queues,
        server_memory=server_memory,
    )
    shape = ClusterConfig(
        attention_workers=attention_workers,
        expert_servers=expert_servers,
        min_replicas=min_replicas,
        redundant_experts=redundant_experts,
        **more,
    )
    with launch(worker, shape, seed=0, record=record) as launched:
        yield Cluster(launched, begun)
