"""By which rule and policy an expert server's process begins runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.call_pairs import descriptors

from moesaic.config import ExpertServerConfig, QueueConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.messages import Hold, Shutdown
from moesaic.core.metrics import ResidencyStats
from moesaic.experts import process
from moesaic.experts.backend import ExpertBackend
from moesaic.experts.process import _policy, _scheduler, _start_rule
from moesaic.models import files
from moesaic.policy.scheduling.microqueue import Defrag, DefragWithHistory, FirstLayerFirst
from moesaic.policy.scheduling.minimum_batch import Decisions, cpu_curves
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, WaitForSmallCalls
from moesaic.policy.scheduling.schedulers.server_setup import (
    BARRIER_SECONDS,
    LONGEST_WAIT,
    UNREACHABLE_PAIRS,
    WAITED_RUNS,
)
from moesaic.transport.stream import StreamConnection, stream_pair
from moesaic.transport.wakeup import Wakeup

CPU = Decisions(cpu_curves(1e6, 1e6), 8, 2)
LAYOUT = ExpertLayout({0: "a", 1: "b"}, "g", "u", "d", 8, 4, 2, 1, "float32")


def config(**settings: Any) -> ExpertServerConfig:
    made = ExpertServerConfig("m", LAYOUT, "unix:x", **settings)
    assert ExpertServerConfig.from_json(made.to_json()).queues == made.queues
    return made


@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_a_run_begins_as_it_is_told_or_as_it_is_worth(schedule: str) -> None:
    assert _start_rule(config(schedule=schedule), CPU, 4) == WaitForSmallCalls(24, LONGEST_WAIT, WAITED_RUNS)
    waiting = QueueConfig(expert_batch_pairs=24, expert_batch_wait=2.5)
    assert _start_rule(config(schedule=schedule, queues=waiting), CPU, 4) == EnoughPairs(
        pairs=24, wait=0.0025
    )
    at_once = QueueConfig(expert_batch_pairs=1)
    assert _start_rule(config(schedule=schedule, queues=at_once), CPU, 4) == EnoughPairs(pairs=1, wait=0.0)


def test_at_a_barrier_it_waits_for_everybody() -> None:
    assert _start_rule(config(schedule="barrier"), CPU, 4) == EnoughPairs(UNREACHABLE_PAIRS, BARRIER_SECONDS)


def test_a_server_decides_by_the_curves_of_its_file(tmp_path: Path) -> None:
    """Two experts on a CPU: clients wait below 12 pairs. On devices of their own they never wait, and each
    expert has a queue."""

    class OnCpu:
        device_name = ""

        def __init__(self) -> None:
            self.resident_experts = dict[int, list[int]]()

    first, backend = Hold(0, {0: [0, 1], 1: [0, 1]}), cast(ExpertBackend, OnCpu())
    papers = str(Path(__file__).parents[2] / "benchmarks" / "papers" / "async_moe.toml")
    for settings, pairs, groups in (
        ({"schedule": "async"}, 12, 1),
        ({"schedule": "async", "paced": papers}, 0, 2),
        ({"schedule": "async", "policy_file": papers}, 0, 2),
        ({"schedule": "lockstep", "policy_file": papers}, 0, 1),
    ):
        made = _scheduler(config(**settings), backend, first)
        assert made._rule == WaitForSmallCalls(pairs, LONGEST_WAIT, WAITED_RUNS)
        assert made._shape == (2, groups)


def test_the_policy_that_is_set_counts_where_servers_have_queues_of_one() -> None:
    assert _policy(config(schedule="lockstep")) == _policy(config(schedule="barrier")) == FirstLayerFirst()
    assert _policy(config(schedule="async")) == Defrag(urgency=None)
    said = QueueConfig(queue_urgency=0.5)
    assert _policy(config(schedule="async", queue_policy="flfs", queues=said)) == FirstLayerFirst(urgency=0.5)
    remembering = _policy(config(schedule="async", queues=QueueConfig(0.5, queue_history=3)))
    assert isinstance(remembering, DefragWithHistory)
    assert remembering.settings == Defrag(urgency=0.5)


class Backend:
    """Has no experts. The thread that loads waits in it for `may_end`."""

    name, device_name = "reference", "an unknown device"

    def __init__(self) -> None:
        self.resident_experts: dict[int, list[int]] = {}
        self.loading, self.may_end = threading.Event(), threading.Event()

    def load(self, experts_by_layer: object) -> None:
        if threading.current_thread().name == "loading":
            self.loading.set()
            assert self.may_end.wait(20)

    def keep_only(self, experts_by_layer: object) -> None: ...


def on_device(monkeypatch: pytest.MonkeyPatch, backend: Backend, **settings: Any) -> ExpertServerConfig:
    """The settings of a server that takes this backend."""
    monkeypatch.setattr(process, "_backend", lambda config: (backend, ResidencyStats))
    return ExpertServerConfig(str(files.resolve("demo")), LAYOUT, "unix:@", device="cuda", **settings)


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Backend, Future[int]]]:
    """The process of a server that was told to end while it loads, as a thread."""
    backend, (ours, theirs), wakeup = Backend(), stream_pair(), Wakeup()
    made = on_device(monkeypatch, backend)
    here, there = StreamConnection(ours), StreamConnection(theirs, on_message=wakeup.ring)
    with ThreadPoolExecutor(1) as pool, closing(wakeup), closing(there), closing(here):
        here.send(Hold(1, {}, bytes(32)))
        running = pool.submit(process.serve, there, made, wakeup)
        assert backend.loading.wait(20)
        here.send(Shutdown())
        yield backend, running
        backend.may_end.set()
        assert running.result(20) == 0


def test_a_server_ends_once_nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends its threads when they leave compiled code. In torch, that aborts the process."""
    with served(monkeypatch) as (_, running), pytest.raises(TimeoutError):
        running.result(0.1)


def test_a_server_that_ended_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that joined serves one cluster after the other in its process."""
    before = descriptors()
    with served(monkeypatch):
        pass
    assert descriptors() == before
