"""Attention workers that die or freeze while their rows are on the sanitizer's device, with real processes.

A supervisor starts workers and expert servers. Files take the place of the GPUs' memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import gpu_cases, pairs
from tests.support.cluster_driver import Cluster
from tests.support.gpu_clusters import (
    NEW,
    SCHEDULES,
    SERVERS,
    TWO,
    WORKERS,
    Strike,
    Tokens,
    cards,
    of_one_process,
    workload,
)
from tests.support.gpu_forks import forks
from tests.support.gpu_shared_memory import mapped_by

pytestmark = pytest.mark.slow
FROZEN_SECONDS = "moesaic.cluster.supervisor.FROZEN_SECONDS"
NEVER = 1e6
FIRST = WORKERS[0]


@pytest.fixture(scope="module", autouse=True)
def on_device() -> Iterator[None]:
    with forks():
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


@pytest.fixture(scope="module")
def expected(path: Path) -> Tokens:
    """Of one process on the CPU."""
    return of_one_process(path)


@pytest.mark.parametrize("schedule", pairs.some(SCHEDULES, ["two in flight", "async"]))
def test_a_worker_that_is_killed(path: Path, expected: Tokens, schedule: str) -> None:
    """Servers close its memory, the other worker goes on, and another process takes its place."""
    with cards(path, **TWO, **SCHEDULES[schedule]) as found:
        served, lost = found.served, set[int]()
        strike = Strike(served.pid(FIRST), signal.SIGKILL, lambda: lost.update(found.exported(FIRST)))
        assert found.tokens(strike) == expected and strike.sent and len(lost) >= 3
        served.until(lambda: not lost & found.opened())
        found.restarted(1)
        assert served.broken_off == 0, "no server was lost"
        found.check_counts(expected)
        again = found.exported(FIRST)
        assert again & found.opened() and not again & lost, "it is asked again, with memory of its own"


def test_a_worker_that_is_frozen(path: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with its memory. When it is frozen once more, the supervisor kills it."""
    monkeypatch.setattr(FROZEN_SECONDS, NEVER)
    with cards(path, **TWO) as found:
        served = found.served
        strike = Strike(served.pid(FIRST), signal.SIGSTOP)
        served.submit(*workload())
        while not strike.sent:
            served.pump(10.0)
            strike(served.running.tokens)
        mine = requests_of(served, 0)
        assert mine
        served.until(lambda: served.running.unfinished <= mine)
        kept = found.exported(FIRST)
        assert len(kept & found.opened()) >= 3, "it may still read it"
        os.kill(served.pid(FIRST), signal.SIGCONT)
        assert [ids for ids, _ in served.finish()] == expected
        served.forget()
        assert found.exported(FIRST) >= kept
        assert served.supervisor.report().counters.process_deaths == 0
        found.check_counts(expected)

        monkeypatch.setattr(FROZEN_SECONDS, 2.0)
        lost: set[int] = set()
        strike = Strike(served.pid(FIRST), signal.SIGSTOP, lambda: lost.update(found.exported(FIRST)))
        assert found.tokens(strike) == expected
        monkeypatch.setattr(FROZEN_SECONDS, NEVER)
        served.until(lambda: not lost & found.opened())
        found.restarted(1)
        found.check_counts(expected)


def requests_of(served: Cluster, worker: int) -> set[int]:
    """Those that have not ended."""
    with served.router._lock:
        return {number for number, entry in served.router._entries.items() if entry.worker == worker}


def test_a_worker_ends_while_a_server_is_frozen(
    path: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the server goes on it finds requests of a process that has ended, and leaves its memory."""
    monkeypatch.setattr(FROZEN_SECONDS, NEVER)
    with cards(path, **TWO) as found:
        served, frozen, lost = found.served, found.served.pid(SERVERS[0]), set[int]()
        strike = Strike(frozen, signal.SIGSTOP, lambda: lost.update(found.exported(FIRST)))

        def disturb(tokens: int) -> None:
            strike(tokens)
            if tokens > 2 * NEW:
                kill(tokens)

        kill = Strike(served.pid(FIRST), signal.SIGKILL)
        assert found.tokens(disturb) == expected and kill.sent
        served.until(lambda: not lost & mapped_by(served.pid(SERVERS[1])))
        assert lost & mapped_by(frozen)
        os.kill(frozen, signal.SIGCONT)
        served.until(lambda: not lost & mapped_by(frozen))
        found.restarted(1)
        assert served.pid(SERVERS[0]) == frozen
        found.check_counts(expected)
