"""A worker as a real process behind a real socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.processes import gone

from moesaic.cluster.local import ChildProcess, spawn_worker
from moesaic.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig, worker_environment
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.runtime.group.meeting import RankPlace
from moesaic.transport.stream import StreamConnection, stream_pair

DEMO = WorkerConfig(ModelConfig("demo", threads=1))


def until(worker: ChildProcess, kind: type[messages.Message]) -> messages.Message:
    """The next message of `kind`; what comes before it is dropped."""
    while True:
        message = worker.connection.receive(60.0)
        assert message is not None, "the worker is silent"
        if isinstance(message, kind):
            return message


@pytest.fixture
def worker() -> Iterator[ChildProcess]:
    started = spawn_worker(DEMO)
    yield started
    started.stop()


def long_request(request_id: int) -> messages.Submit:
    params = SamplingParams(temperature=0.0, max_tokens=1500, seed=0, ignore_eos=True)
    return messages.Submit([Request(request_id, [5, 6, 7], params)])


@pytest.mark.slow
def test_a_worker_serves_cancels_and_shuts_down(worker: ChildProcess) -> None:
    ready = until(worker, messages.Ready)
    assert isinstance(ready, messages.Ready) and ready.info.model_type == "qwen3_moe"
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True)
    worker.connection.send(messages.Submit([Request(0, [5, 6, 7], params)]))
    got: list[messages.Tokens] = []
    while not got or got[-1].finish == [None]:
        message = until(worker, messages.Tokens)
        assert isinstance(message, messages.Tokens)
        got.append(message)
    assert len(got) == 4 and got[-1].finish == [FinishReason.LENGTH]

    worker.connection.send(long_request(1))
    until(worker, messages.Tokens)
    worker.connection.send(messages.Cancel([1]))
    stats = until(worker, messages.Stats)
    while not (isinstance(stats, messages.Stats) and stats.stats.running == 0):
        stats = until(worker, messages.Stats)
    blocks = stats.stats.blocks
    assert blocks.num_used == 0 and blocks.num_free + blocks.num_cached == blocks.num_total
    worker.connection.send(messages.Shutdown())
    assert worker.process.wait(60) == 0


@pytest.mark.slow
def test_a_killed_worker_is_noticed_at_once(worker: ChildProcess) -> None:
    until(worker, messages.Ready)
    worker.connection.send(long_request(0))
    until(worker, messages.Tokens)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ConnectionLost):
        while True:
            assert worker.connection.receive(60.0) is not None, "its end is not noticed"
    assert worker.describe_end() == f"worker process {worker.pid} killed by signal 9"


@pytest.mark.slow
def test_a_setting_that_does_not_fit_is_told_in_one_line() -> None:
    worker = spawn_worker(WorkerConfig(ModelConfig("demo", threads=1), CacheConfig(kv_cache_memory="1KiB")))
    failed = until(worker, messages.WorkerFailed)
    assert isinstance(failed, messages.WorkerFailed) and failed.user_error
    assert "--kv-cache-memory" in failed.error and "\n" not in failed.error
    assert worker.process.wait(60) == 2
    worker.stop()


BROKEN = """
import torch
from moesaic.runtime.__main__ import main
from moesaic.runtime.step.recorded_runner import RecordedRunner

def broken(*arguments):
    raise {error}

RecordedRunner.begin = broken
raise SystemExit(main())
"""
BUG = "RuntimeError('no memory left\\nby far')"
FULL = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of ..')"


@pytest.mark.slow
@pytest.mark.parametrize("error", [BUG, FULL], ids=["a bug", "a full device"])
def test_an_error_in_a_step_reaches_the_engine(error: str) -> None:
    """A bug with a traceback in the log, a GPU that has no more memory in one line."""
    ours, theirs = stream_pair()
    command = [sys.executable, "-c", BROKEN.format(error=error), "--connection-fd", str(theirs.fileno())]
    with theirs, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--config", DEMO.to_json()], pass_fds=[theirs.fileno()], stderr=log
        )
        theirs.close()
        worker = ChildProcess(process, StreamConnection(ours))
        until(worker, messages.Ready)
        worker.connection.send(long_request(0))
        failed = until(worker, messages.WorkerFailed)
        assert isinstance(failed, messages.WorkerFailed)
        code = worker.process.wait(60)
        log.seek(0)
        text = log.read().decode()
    worker.stop()
    if error is FULL:
        assert failed.user_error and "--max-num-batched-tokens" in failed.error and "\n" not in failed.error
        assert failed.error.startswith("a step: CUDA out of memory; allowed: ")
        assert code == 2 and text == ""
        return
    assert failed == messages.WorkerFailed("RuntimeError: no memory left", user_error=False)
    assert code == 1 and "Traceback" in text and "in broken" in text and "by far" in text


PARENT = """
import sys, time
from moesaic.cluster.local import spawn_worker
from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.request import Request, SamplingParams
worker = spawn_worker(WorkerConfig(ModelConfig("demo", threads=1)))
while not isinstance(worker.connection.receive(60.0), messages.Ready):
    pass
params = SamplingParams(temperature=0.0, max_tokens=1500, seed=0, ignore_eos=True)
worker.connection.send(messages.Submit([Request(0, [5, 6, 7], params)]))
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_worker_dies_with_its_parent_in_the_middle_of_a_request() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "told", ["", RankPlace("@nobody", "00" * 32, 1, 2).to_line()], ids=["nothing", "where to meet"]
)
def test_a_rank_ends_with_a_first_rank_that_was_killed(told: str) -> None:
    """Whatever the first rank had told it by then."""
    config = replace(DEMO, parallel=ParallelConfig(2)).to_json()
    process = subprocess.run(
        [sys.executable, "-m", "moesaic.runtime.group", "--rank", "1", "--config", config],
        input=told, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=worker_environment(),
        timeout=60,
    )  # fmt: skip
    assert process.returncode == 0 and not process.stderr
