"""Two workers that ask the same servers by graphs, in one NVSHMEM job. One of them dies in a graph."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.test_full_graphs import NEW, PARAMS, PROMPTS, Replays, expected, held, layout, path, pytestmark
from tests.gpu.test_nvshmem_graphs import asking
from tests.support import served_worker
from tests.support.gpu_graphs import graphs
from tests.support.gpu_nvshmem import nvshmem
from tests.support.gpu_sanitizer import sanitized
from tests.support.gpu_server_process import servers
from tests.support.gpu_shared_memory import shared_memory
from tests.support.hosts import end_with_parent
from tests.support.nvshmem_cluster import Job

from moesaic.core.experts import ExpertLayout
from moesaic.gpu.exchange.exchange import DeviceExchange

__all__ = ["expected", "layout", "path", "pytestmark"]
SECONDS = 60.0


def _other_worker(path: Path, end: Connection) -> None:
    """Another worker. It dies while its third graph waits for servers, and says before that graphs begin."""
    end_with_parent()
    launch = DeviceExchange._launch

    def launched(exchange: DeviceExchange, replay: object) -> object:
        found = launch(exchange, replay)  # type: ignore[arg-type]
        if replays.begun == 3:
            until = time.monotonic() + SECONDS
            while not any(one.mailbox.progress()[0] for one in exchange._servers.values()):
                assert time.monotonic() < until
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    with np.errstate(all="ignore"), sanitized(), graphs(), shared_memory(), nvshmem():
        patch = pytest.MonkeyPatch()
        replays = Replays(patch)
        replays.then = {1: lambda: end.send_bytes(b"asks")}
        patch.setattr(DeviceExchange, "_launch", launched)
        directory, place = end.recv()
        places = [place]

        def follow(said: object, send: object) -> bool:
            if places:
                send(places.pop())  # type: ignore[operator]
            return True

        served_worker.generated(asking(path), directory, PROMPTS, PARAMS, follow=follow)


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_the_other_one_alone(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of the other one fails, and no expert of its steps is elsewhere."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    other = context.Process(target=_other_worker, args=(path, theirs))
    other.start()
    theirs.close()
    every = held(layout, 0, 1)

    def asks() -> None:
        assert mine.poll(SECONDS) and mine.recv_bytes() == b"asks"

    try:
        with (
            np.errstate(all="ignore"), sanitized(), graphs(), shared_memory(), nvshmem() as jobs,
            servers(path, layout, [every, every], transport="nvshmem") as both,
        ):  # fmt: skip
            replays, job = Replays(monkeypatch), Job(jobs, both.children, workers=2)
            mine.send((both.directory, job.others[0]))
            replays.then = {2: asks, 4: lambda: other.join(SECONDS)}
            given = asking(path), both.directory, PROMPTS, PARAMS
            found = served_worker.generated(*given, follow=job.follow)  # type: ignore[arg-type]
    finally:
        other.kill()
        other.join()
        mine.close()
    assert other.exitcode == -signal.SIGKILL
    assert found == expected
    assert (replays.begun, replays.failed) == (NEW - 1, 0)
    asked = [set(np.frombuffer(table, np.int64).tolist()) for table in replays.tables]
    assert asked == [{0, 1}] * (NEW - 1)
