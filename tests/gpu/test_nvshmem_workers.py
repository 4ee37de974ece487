"""What a worker says of NVSHMEM when it is ready, and what it does with its place in a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from tests.gpu.test_full_graphs import full
from tests.support import gpu_cases
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import sanitized
from tests.support.gpu_shared_memory import shared_memory
from tests.support.hosts import soon
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.messages import JoinJob, Ready, Shutdown
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.nvshmem.job import SECOND
from moesaic.gpu.nvshmem.symmetric_heap import SymmetricHeap
from moesaic.runtime.keeping import KeptModel
from moesaic.runtime.process import serve
from moesaic.transport.stream import StreamConnection, stream_pair
from moesaic.transport.wakeup import Wakeup

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
PLACE = JoinJob(b"a job", 1, 2, 3)


class Jobs:
    """SymmetricJobs of a network without any other process."""

    def __init__(self) -> None:
        self.joined: list[tuple[bytes, int, int]] = []

    def unique_id(self) -> bytes:
        return b"a name"

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> SymmetricHeap:
        self.joined.append((unique_id, pe, pes))
        raise ConfigError("nobody else is there")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    made = Jobs()
    monkeypatch.setattr(symmetric_heap, "jobs", lambda device: made)
    with np.errstate(all="ignore"), sanitized(), graphs(), shared_memory():
        yield made


@pytest.fixture(scope="module")
def by_nvshmem(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return replace(full(folder), transport="nvshmem", supervised=False)


def life(config: WorkerConfig, kept: KeptModel | None = None) -> Ready:
    """A worker that gets a place, and then ends. What it said when it was ready."""
    (ours, theirs), wakeup = stream_pair(), Wakeup()
    here, there = StreamConnection(ours), StreamConnection(theirs, on_message=wakeup.ring)
    with closing(there), closing(here):
        here.send(PLACE)
        here.send(Shutdown())
        assert serve(there, config, wakeup, kept_model=kept) == 0
        while not isinstance(found := here.receive(20.0), Ready):
            assert found is not None
    return found


def test_a_worker_joins_one_job_in_its_life(
    jobs: Jobs, by_nvshmem: WorkerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process stays, and gets a place in another cluster too."""
    kept = KeptModel()
    assert life(by_nvshmem, kept).nvshmem == b"a name"
    soon(lambda: "nobody else is there; decode steps are computed in parts" in caplog.messages)
    assert life(by_nvshmem, kept).nvshmem == b""
    assert jobs.joined == [(PLACE.unique_id, 1, 5)]
    assert caplog.messages.count(SECOND) == 2, "when it serves again, and when it gets a place"


def test_prefill_workers_and_other_transports_offer_none(jobs: Jobs, by_nvshmem: WorkerConfig) -> None:
    assert life(replace(by_nvshmem, kv_role="prefill")).nvshmem == b""
    assert life(replace(by_nvshmem, transport="cuda_ipc")).nvshmem == b""
