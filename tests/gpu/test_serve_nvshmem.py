"""`moesaic serve --transport nvshmem` with all of its processes on the sanitizer's device."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gpu import test_serve_gpu
from tests.support import gpu_cases, gpu_nvshmem
from tests.support.gpu_process import NAME
from tests.support.hosts import Hosts, missing

from moesaic.gpu.exchange import exchange

FLAGS = (
    "--kernels", "triton", "--cudagraph-mode", "full", "--kv-cache-memory", "1MiB", "--transport", "nvshmem",
)  # fmt: skip
PATIENCE = 120.0


def served(path: Path, errors: Path, *flags: str, begun: Callable[[], object] = bool) -> list[list[int]]:
    """Tokens of requests that are sent together, and then of the first one, once its steps are graphs.

    errors: file of what the processes say. begun: called before the second part.
    """
    with test_serve_gpu.serving(path, *FLAGS, *flags, hardware=()) as server, ThreadPoolExecutor(4) as pool:
        prompts, until = test_serve_gpu.prompts(), time.monotonic() + PATIENCE
        found = list(pool.map(lambda prompt: test_serve_gpu.asked(server, prompt), prompts))
        begun()
        while exchange.WHOLE_GRAPH not in errors.read_text():
            assert time.monotonic() < until, errors.read_text()
            assert test_serve_gpu.asked(server, prompts[0]) == found[0]
        return [*found, test_serve_gpu.asked(server, prompts[0])]


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What processes say on standard error goes to this file."""
    file = tmp_path / "errors"
    file.touch()
    popen = subprocess.Popen

    def started(command: list[str], **settings: object) -> object:
        with file.open("a") as log:
            return popen(command, **{"stderr": log, **settings})  # type: ignore[call-overload]

    monkeypatch.setattr(test_serve_gpu.subprocess, "Popen", started)
    return file


@pytest.mark.full
def test_whole_steps_are_one_graph(tmp_path: Path, errors: Path) -> None:
    """Each process has a GPU of its own. The tokens are those of one process, before and in the job."""
    gpu_cases.write("mixtral-window", tmp_path)
    found = served(tmp_path, errors, "--devices", "0,1,2", "--expert-servers", "2")
    one_process = test_serve_gpu.in_memory(tmp_path)
    assert found == [*one_process, one_process[0]]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_experts_on_another_host(tmp_path: Path, errors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the experts are on a server that joined from another host, which shares no memory."""
    gpu_cases.write("mixtral-window", tmp_path)
    secret = str(tmp_path / "secret")
    with Hosts(2, [tmp_path]) as hosts, hosts[0].entered():
        address = hosts[0].address
        monkeypatch.setenv(gpu_nvshmem.ADDRESS, address)
        join = [sys.executable, "-m", NAME, "join", f"{address}:7000", "--role", "expert-server"]
        join += ["--secret-file", secret, "--threads", "1"]

        def joins() -> None:
            with (tmp_path / "joined").open("w") as log:
                hosts[1].popen(join, stdout=log, stderr=log, cwd=test_serve_gpu.ROOT)

        flags = "--devices", "0,1", "--expert-servers", "1", "--nvshmem-pes", "3"
        flags += "--cluster-address", f"tcp:{address}:7000", "--cluster-secret-file", secret
        found = served(tmp_path, errors, *flags, begun=joins)
        told = errors.read_text()
    one_process = test_serve_gpu.in_memory(tmp_path)
    assert found == [*one_process, one_process[0]]
    assert "an NVSHMEM job: 1 attention workers and 2 expert servers" in told
