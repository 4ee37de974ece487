"""Experts on servers, with the worker or the servers on the sanitizer's device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import gpu_cases, served_worker
from tests.support.gpu_sanitizer import sanitized
from tests.support.served_worker import server

from moesaic.config import CacheConfig, ExpertServerConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import Directory
from moesaic.core.request import SamplingParams
from moesaic.experts.backend import CallPairs
from moesaic.experts.process import _backend
from moesaic.experts.torch_backend import TorchBackend
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.transport.local import local_pair
from moesaic.transport.wakeup import Wakeup

NEW = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


def config(
    path: Path, device: str, kv_cache_memory: str = "1MiB", kernels: str = "reference", **scheduler: Any
) -> WorkerConfig:
    model = ModelConfig(str(path), device=device, kernels=kernels, threads=1)  # type: ignore[arg-type]
    schedule = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, **scheduler)
    return WorkerConfig(model, CacheConfig(kv_cache_memory), schedule, remote_experts=True, supervised=True)


def generated(
    config: WorkerConfig, directory: Directory, prompts: Sequence[list[int]] = (), new: int = NEW
) -> dict[int, list[int]]:
    """Tokens of a worker that asks servers."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, seed=0)
    return served_worker.generated(config, directory, prompts or gpu_cases.prompts()[:4], params)


@pytest.fixture(scope="module")
def expected(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    """With all on the CPU."""
    on_cpu = config(path, "cpu")
    with server(path, read_expert_layout(on_cpu.model), tmp_path_factory.mktemp("expected")) as directory:
        return generated(on_cpu, directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        {"inflight_batches": 2},
        {"schedule": "async"},
        pytest.param({"schedule": "barrier"}, marks=pytest.mark.slow),
        pytest.param({"combine": "partial"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "async", "combine": "partial"}, marks=pytest.mark.slow),
    ],
)
def test_a_worker_on_a_gpu_asks_servers_on_the_cpu(
    path: Path, expected: dict[int, list[int]], tmp_path: Path, scheduler: dict[str, Any]
) -> None:
    on_cpu = config(path, "cpu")
    with server(path, read_expert_layout(on_cpu.model), tmp_path) as directory, sanitized():
        assert generated(config(path, "cuda", **scheduler), directory) == expected


def test_a_server_on_a_gpu_computes_the_same(path: Path) -> None:
    layout = read_expert_layout(config(path, "cpu").model)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((5, layout.hidden), dtype=np.float32)
    rows = np.arange(5, dtype=np.int32)
    found = []
    for device in ("cpu", "cuda"):
        parts = [
            CallPairs(hidden, rows, (rows % 3 + first).astype(np.int32), np.zeros_like(hidden), np.arange(5))
            for first in (0, 2)
        ]
        with sanitized():
            arithmetic = TorchBackend(path, layout, device, "auto" if device == "cuda" else "reference", 1)
            arithmetic.load({2: range(6)})
            arithmetic.run(2, parts)
            arithmetic.keep_only({2: [1]})
            assert arithmetic.resident_experts == {2: [1]}
        found.append([part.results for part in parts])
    assert all(np.allclose(one, other, atol=1e-6) and one.any() for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_a_server_on_a_cpu_takes_what_a_worker_on_a_gpu_computes_from(path: Path, kernels: str) -> None:
    """Native kernels do not know float16, in which a GPU keeps some checkpoints."""
    layout = replace(read_expert_layout(config(path, "cpu").model), dtype="float16")
    assert layout.expert_bytes == 3 * layout.hidden * layout.width * 2
    settings = ExpertServerConfig(str(path), layout, "unix:x", kernels=kernels)  # type: ignore[arg-type]
    arithmetic, _ = _backend(settings)
    assert arithmetic.name == "reference (torch)"
    arithmetic.load({1: [3]})
    hidden, zero = np.ones((1, layout.hidden), np.float32), np.zeros(1, np.int32)
    out = np.zeros_like(hidden)
    arithmetic.run(1, [CallPairs(hidden, zero, zero + 3, out, np.zeros(1, np.int64))])
    assert out.any()


def test_processes_that_share_a_gpu_need_to_be_told_what_to_take(path: Path) -> None:
    ours, theirs = local_pair()
    with sanitized(), pytest.raises(ConfigError, match="^--kv-cache-memory: got 'auto'; allowed: a size"):
        settings = replace(config(path, "cuda", "auto"), beside=1)
        build_worker(WorkerContext(settings, theirs, time.monotonic, wakeup=Wakeup()))
    assert ours.receive(0.0) is None, "before anybody loads anything"
    with server(path, read_expert_layout(config(path, "cpu").model), path.parent) as directory:
        assert generated(config(path, "cpu", "auto"), directory), "on a CPU memory is taken as it is written"
