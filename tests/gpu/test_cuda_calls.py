"""Rows between a worker and expert servers on real GPUs, by CUDA IPC. Nothing here runs where torch sees no
GPU; `test_device_calls.py` does in its stead, with files in place of a GPU's memory."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_device_calls, test_servers
from tests.support import gpu_cases
from tests.support.gpu_server_process import Servers, servers

from moesaic.cluster.local import spawn_server
from moesaic.config import HostTransport
from moesaic.gpu.ipc import device_sharing
from moesaic.runtime.model_loading import read_expert_layout

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.slow,
]


def _double(end: Connection) -> None:
    """Another process: doubles the numbers in the memory that it is told."""
    opened = device_sharing.sharing(CUDA).open(end.recv_bytes())
    numbers = opened.tensor[:16].view(torch.float32)
    assert numbers.device == CUDA
    numbers.mul_(2)
    torch.cuda.synchronize()
    opened.close()
    end.send(True)


def test_a_process_writes_into_memory_of_another() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_double, args=(theirs,))
    process.start()
    exported = device_sharing.sharing(CUDA).export(16)
    numbers = exported.tensor[:16].view(torch.float32)
    numbers.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    torch.cuda.synchronize()
    mine.send_bytes(exported.name)
    assert mine.poll(60) and mine.recv()
    assert numbers.tolist() == [2.0, -4.0, 1.0, 6.0]
    process.join(60)
    exported.close()
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


def found(path: Path, transport: HostTransport, kernels: str, **hooks: Any) -> dict[int, list[int]]:
    """Tokens of a worker that asks two servers, each with all experts."""
    config = test_servers.config(path, "cuda", "64MiB", kernels=kernels)
    layout = read_expert_layout(config.model)
    every = dict.fromkeys(layout.layers, range(layout.num_experts))
    with servers(path, layout, [every, every], start=spawn_server, transport=transport) as running:
        after = {name: hook(running) for name, hook in hooks.items()}
        return test_device_calls.generated(replace(config, transport=transport), running.directory, **after)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_tokens_are_those_of_rows_in_ram(path: Path, kernels: str) -> None:
    assert found(path, "cuda_ipc", kernels) == found(path, "shm", kernels)


def test_a_server_that_is_killed_changes_no_token(path: Path) -> None:
    def kill(running: Servers) -> Any:
        return test_device_calls.Victim(running, signal.SIGKILL).after

    assert found(path, "cuda_ipc", "reference", after=kill) == found(path, "shm", "reference")
