"""`moesaic serve --transport cuda_ipc` with all of its processes on the sanitizer's device."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gpu import test_serve_gpu
from tests.support import gpu_cases
from tests.support.gpu_process import NAME

from moesaic.gpu.exchange import exchange

FLAGS = (
    "--kernels", "reference", "--kv-cache-memory", "1MiB", "--transport", "cuda_ipc",
    "--attention-workers", "2", "--expert-servers", "2", "--redundant-experts", "2",
)  # fmt: skip


@pytest.mark.slow
def test_clients_get_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Two workers ask two servers, of which each has an answer for every worker in memory of that worker."""
    gpu_cases.write("mixtral-window", tmp_path)
    with test_serve_gpu.serving(tmp_path, *FLAGS, hardware=()) as server, ThreadPoolExecutor(4) as pool:
        prompts = test_serve_gpu.prompts()
        found = list(pool.map(lambda prompt: test_serve_gpu.asked(server, prompt), prompts))
    assert found == test_serve_gpu.in_memory(tmp_path)


@pytest.mark.full
def test_ranks_ask_servers(tmp_path: Path) -> None:
    """A worker that is a group of two processes: its first rank has its rows on the device."""
    gpu_cases.write("deepseek-lite-yarn", tmp_path)
    flags = "--kernels", "reference", "--transport", "cuda_ipc", "--kv-cache-memory", "1MiB"
    flags += "--expert-servers", "2", "--tensor-parallel-size", "2"
    with test_serve_gpu.serving(tmp_path, *flags, hardware=()) as server, ThreadPoolExecutor(4) as pool:
        prompts = test_serve_gpu.prompts()
        found = list(pool.map(lambda prompt: test_serve_gpu.asked(server, prompt), prompts))
    assert found == test_serve_gpu.in_memory(tmp_path)


@pytest.mark.full
def test_whole_steps_are_one_graph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each process has a GPU of its own."""
    gpu_cases.write("mixtral-window", tmp_path)
    flags = "--kernels", "triton", "--cudagraph-mode", "full", "--devices", "0,1,2", "--expert-servers", "2"
    flags += "--transport", "cuda_ipc", "--kv-cache-memory", "1MiB"
    with test_serve_gpu.serving(tmp_path, *flags, hardware=()) as server, ThreadPoolExecutor(4) as pool:
        prompts = test_serve_gpu.prompts()
        found = list(pool.map(lambda prompt: test_serve_gpu.asked(server, prompt), prompts))
        found += [test_serve_gpu.asked(server, prompts[0])]  # by now there are mailboxes
    one_process = test_serve_gpu.in_memory(tmp_path)
    assert found == [*one_process, one_process[0]]
    assert exchange.WHOLE_GRAPH in capfd.readouterr().err


@pytest.mark.slow
def test_processes_that_share_a_gpu_are_told(tmp_path: Path) -> None:
    gpu_cases.write("mixtral-window", tmp_path)
    command = [sys.executable, "-m", NAME, "serve", str(tmp_path), "--port", "0", "--device", "cuda"]
    command += ["--kernels", "triton", "--cudagraph-mode", "full", "--devices", "0", "--expert-servers", "1"]
    command += ["--transport", "cuda_ipc", "--kv-cache-memory", "1MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=test_serve_gpu.ROOT)
    assert done.returncode == 2, done.stderr
    assert "--cudagraph-mode full: each process needs a GPU of its own" in done.stderr
