"""Processes of expert servers that get a place in an NVSHMEM job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from tests.experts.test_process import Backend, on_device
from tests.support.hosts import soon

from moesaic.config import ExpertServerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.messages import Hold, HoldReply, JoinJob, Shutdown
from moesaic.experts import process
from moesaic.experts.keeping import KeptExperts
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.nvshmem.job import SECOND
from moesaic.gpu.nvshmem.symmetric_heap import SymmetricHeap
from moesaic.transport.stream import StreamConnection, stream_pair
from moesaic.transport.wakeup import Wakeup


class Jobs:
    """SymmetricJobs that remember who joined."""

    def __init__(self) -> None:
        self.joined: list[tuple[bytes, int, int]] = []

    def unique_id(self) -> bytes:
        raise AssertionError("a server is never PE 0")

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> SymmetricHeap:
        self.joined.append((unique_id, pe, pes))
        raise ConfigError("NVSHMEM has no network here")


def hold_and_join(config: ExpertServerConfig, place: JoinJob, kept: KeptExperts) -> HoldReply:
    """The life of a server that gets a place in a job once it has its experts."""
    (ours, theirs), wakeup = stream_pair(), Wakeup()
    here, there = StreamConnection(ours), StreamConnection(theirs, on_message=wakeup.ring)
    with ThreadPoolExecutor(1) as pool, closing(wakeup), closing(there), closing(here):
        running = pool.submit(process.serve, there, config, wakeup, b"", kept)
        here.send(Hold(1, {}, bytes(32)))
        while not isinstance(found := here.receive(20), HoldReply):
            assert found is not None
        here.send(place)
        here.send(Shutdown())
        assert running.result(20) == 0
    return found


def test_a_server_joins_one_job_in_its_life(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process stays, and gets a place in another cluster too."""
    backend, jobs, kept = Backend(), Jobs(), KeptExperts()
    backend.may_end.set()
    monkeypatch.setattr(symmetric_heap, "jobs", lambda device: jobs)
    config = on_device(monkeypatch, backend, transport="nvshmem")
    assert hold_and_join(config, JoinJob(b"first", 2, 1, 2), kept).nvshmem
    refused = "NVSHMEM has no network here; decode steps are computed in parts"
    soon(lambda: refused in caplog.messages)
    assert not hold_and_join(config, JoinJob(b"second", 1, 1, 2), kept).nvshmem
    assert jobs.joined == [(b"first", 2, 3)]
    assert caplog.messages.count(SECOND) == 2, "when it serves again, and when it gets a place"


def test_a_server_without_nvshmem_joins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    backend.may_end.set()
    monkeypatch.setattr(symmetric_heap, "jobs", lambda device: pytest.fail("nobody asked for it"))
    made = on_device(monkeypatch, backend)
    assert not hold_and_join(made, JoinJob(b"first", 2, 1, 2), KeptExperts()).nvshmem
