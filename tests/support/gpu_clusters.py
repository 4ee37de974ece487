"""Clusters whose workers and expert servers share memory of the sanitizer's device, and what is done to them.

Processes are those of `gpu_forks`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moesaic import LLM, SamplingParams
from tests.support import model_configs, tiny_models
from tests.support.cluster_driver import Cluster, cluster
from tests.support.gpu_shared_memory import mapped_by

NEW, LENGTHS = 24, (3, 20, 17, 1)
WORKERS = "attention worker 0", "attention worker 1"
SERVERS = "expert server 0", "expert server 1"
TWO: dict[str, Any] = {"attention_workers": 2, "dispatch": "round-robin"}
"""Workers that get the requests in turn."""
RANKS: dict[str, Any] = {"attention_workers": 1, "tensor_parallel_size": 2}
"""A worker that is a group."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep": {},
    "two in flight": {"inflight_batches": 2},
    "barrier": {"schedule": "barrier"},
    "async": {"schedule": "async"},
}
SETTLED_SECONDS = 1.0
"""Reports come five times a second."""
Tokens = list[list[int]]


def workload() -> tuple[Tokens, list[SamplingParams]]:
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in LENGTHS]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)] * len(prompts)


def of_one_process(path: Path) -> Tokens:
    """On the CPU."""
    llm = LLM(str(path), threads=1, device="cpu", kernels="reference", max_model_len=64)
    return [one.outputs[0].token_ids for one in llm.generate(*workload())]


class Cards:
    """A cluster, and who has which memory of the device open."""

    def __init__(self, served: Cluster) -> None:
        self.served = served
        served.connected()

    @staticmethod
    def mapped(process: int) -> set[int]:
        """The memory of the device that a process has open."""
        return mapped_by(process)

    def exported(self, worker: str) -> set[int]:
        return mapped_by(self.served.pid(worker))

    def opened(self) -> set[int]:
        """By all servers."""
        return set().union(*(mapped_by(self.served.pid(server)) for server in SERVERS))

    def tokens(self, disturb: Callable[[int], None] = lambda tokens: None) -> Tokens:
        self.served.submit(*workload())
        found = [ids for ids, _ in self.served.finish(disturb)]
        self.served.forget()
        return found

    def restarted(self, deaths: int) -> None:
        """Wait until all processes serve again after so many deaths, and are connected."""
        self.served.until(lambda: self.served.supervisor.report().counters.process_deaths == deaths)
        self.served.until(lambda: {one.stage for one in self.served.supervisor.status()} == {"serving"})
        self.served.connected()

    def pairs(self) -> tuple[int, int]:
        """(row, expert) pairs that workers have sent and that servers have computed, in the last reports."""
        computed = [one.stats.pairs for one in self.served.supervisor.status() if one.name in SERVERS]
        return self.served.stats.experts.pairs, sum(computed)

    def settled(self) -> tuple[int, int]:
        """`pairs` once all reports have come."""
        found, until = self.pairs(), time.monotonic() + SETTLED_SECONDS
        while time.monotonic() < until:
            self.served.take(0.02)
            if (now := self.pairs()) != found:
                found, until = now, time.monotonic() + SETTLED_SECONDS
        return found

    def check_counts(self, expected: Tokens) -> None:
        """What servers compute now is what workers ask, and nothing beside it."""
        before = self.settled()
        assert self.tokens() == expected

        def all_counted() -> bool:
            sent, computed = (now - then for now, then in zip(self.pairs(), before, strict=True))
            return sent == computed > 0

        self.served.until(all_counted)
        waiting = [one.stats.waiting_pairs for one in self.served.supervisor.status() if one.name in SERVERS]
        assert waiting == [0, 0]


@contextmanager
def cards(path: Path, **settings: Any) -> Iterator[Cards]:
    common: dict[str, Any] = {"expert_servers": 2, "min_replicas": 2, "device": "cuda"}
    common |= {"transport": "cuda_ipc", "kernels": "reference", "kv_cache_memory": "1MiB"}
    common |= {"max_model_len": 64, "max_num_batched_tokens": 16}
    with cluster(str(path), **common | settings) as served:
        yield Cards(served)


class Strike:
    """Sends a signal to a process in the middle of the requests, once."""

    def __init__(self, pid: int, send: signal.Signals, before: Callable[[], None] = lambda: None) -> None:
        """before: called just before."""
        self._pid, self._send, self._before, self.sent = pid, send, before, False

    def __call__(self, tokens: int) -> None:
        if tokens > NEW and not self.sent:
            self.sent = True
            self._before()
            os.kill(self._pid, self._send)
