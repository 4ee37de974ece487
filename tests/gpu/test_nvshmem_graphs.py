"""Decode steps that are one CUDA graph each, with expert servers that share no memory with the worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.test_full_graphs import (
    NEW,
    PARAMS,
    PROMPTS,
    Replays,
    expected,
    full,
    held,
    layout,
    path,
    pytestmark,
)
from tests.support import served_worker
from tests.support.gpu_graphs import graphs
from tests.support.gpu_nvshmem import NvshmemByTcp, nvshmem
from tests.support.gpu_sanitizer import sanitized
from tests.support.gpu_server_process import SECRET
from tests.support.gpu_shared_memory import shared_memory
from tests.support.nvshmem_cluster import job

from moesaic.config import WorkerConfig
from moesaic.core.experts import Directory, ExpertLayout
from moesaic.runtime.worker import Worker

__all__ = ["expected", "layout", "path", "pytestmark"]


def asking(path: Path) -> WorkerConfig:
    return replace(full(path), transport="nvshmem")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[NvshmemByTcp]:
    with np.errstate(all="ignore"), sanitized(), graphs(), shared_memory(), nvshmem() as found:
        yield found


@pytest.fixture
def replays(jobs: NvshmemByTcp, monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


@pytest.mark.slow
def test_a_placement_that_changes_between_steps(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]], jobs: NvshmemByTcp, replays: Replays
) -> None:
    """The experts of two servers change places. A step is one graph, and the host waits for nothing in it."""
    first, second = held(layout, 0), held(layout, 1)
    with job(path, layout, [held(layout, 0, 1), held(layout, 0, 1)], jobs) as (both, follow):
        entries = both.directory.servers
        begin = Directory(1, entries, {0: first, 1: second})
        changes = [Directory(3, entries, {0: first, 1: second}), Directory(2, entries, {0: second, 1: first})]

        def after(tokens: int) -> None:
            if changes and tokens >= 4:
                assert replays.exchange is not None
                replays.exchange.update(changes.pop(), SECRET)

        found = served_worker.generated(asking(path), begin, PROMPTS, PARAMS, follow=follow, after=after)
    assert found == expected and not changes
    assert (replays.begun, replays.failed) == (NEW - 1, 0)
    assert replays.graphs[1:] == [1] * (NEW - 2), "the first step is recorded"
    assert not any(replays.waits[1:])
    assert len(set(replays.tables)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_server_that_is_lost_while_a_graph_waits_for_it(
    path: Path,
    layout: ExpertLayout,
    expected: dict[int, list[int]],
    jobs: NvshmemByTcp,
    replays: Replays,
    signal_number: signal.Signals,
) -> None:
    """Both servers have all experts, so the other one takes the rows. A frozen one wakes up later.

    Its late answers hit memory that is used for it alone. Then its channel is used again.
    """
    every, frozen = held(layout, 0, 1), signal_number == signal.SIGSTOP

    def wake() -> None:
        if frozen:
            os.kill(pid, signal.SIGCONT)

    def after(tokens: int) -> None:
        """The frozen server is asked by graphs again, once all is there that was sent before."""
        exchange, until = replays.exchange, time.monotonic() + 60
        while frozen and exchange is not None and tokens == 2 * NEW - 2 and time.monotonic() < until:
            exchange._remote.arrivals()
            exchange._follow()
            if len(exchange._servers) == 2 and exchange.ready():
                break
            time.sleep(0.01)

    with job(path, layout, [every, every], jobs) as (both, follow):
        pid = both.children[0].pid
        replays.then = {2: lambda: os.kill(pid, signal_number), 4: wake}
        found = served_worker.generated(
            asking(path), both.directory, PROMPTS, PARAMS, follow=follow, after=after
        )
    assert found == expected
    assert (replays.begun, replays.failed) == (NEW - 1, 1)
    asked = [set(np.frombuffer(table, np.int64).tolist()) for table in replays.tables]
    assert asked[0] == {0, 1} and len(asked[2]) == 1, "the table leaves the server out that is gone"
    assert asked[-1] == ({0, 1} if frozen else asked[2])  # servers get their numbers as they join


@pytest.mark.slow
def test_a_server_that_answers_nan_is_found_and_left(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]], jobs: NvshmemByTcp, replays: Replays
) -> None:
    every, blamed = held(layout, 0, 1), []

    def looked_at(worker: Worker) -> None:
        assert replays.exchange is not None
        blamed.extend(entry.server for entry in replays.exchange._remote._blamed_servers)

    with job(path, layout, [every, every], jobs, broken=0) as (both, follow):
        given = asking(path), both.directory, PROMPTS, PARAMS, looked_at
        found = served_worker.generated(*given, follow=follow, faults=True)
    assert found == expected and blamed == [0]
    assert replays.begun == NEW - 1


@pytest.mark.slow
def test_steps_are_computed_in_parts_without_a_job(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]], jobs: NvshmemByTcp
) -> None:
    with job(path, layout, [held(layout, 0, 1)], jobs) as (one, _):
        found = served_worker.generated(asking(path), one.directory, PROMPTS, PARAMS)
    assert found == expected
