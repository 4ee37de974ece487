"""Rows between a worker and expert servers that stay on the sanitizer's device, with real server processes.

Files take the place of the GPUs' memory. Tokens are those of a worker and a server on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import test_servers
from tests.support import gpu_cases, served_worker
from tests.support.gpu_sanitizer import sanitized
from tests.support.gpu_server_process import Servers, servers
from tests.support.gpu_shared_memory import FileSharing, shared_memory

from moesaic.config import WorkerConfig
from moesaic.core.experts import Directory, ExpertLayout
from moesaic.core.request import SamplingParams
from moesaic.runtime.model_loading import layout_of

NEW = test_servers.NEW
Kind = tuple[torch.dtype, int]
"""Type, and numbers in a row."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


@pytest.fixture(scope="module")
def layout(path: Path) -> ExpertLayout:
    return layout_of(test_servers.config(path, "cpu").model)


@pytest.fixture(scope="module")
def expected(
    path: Path, layout: ExpertLayout, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[int]]:
    """With all on the CPU."""
    with served_worker.server(path, layout, tmp_path_factory.mktemp("expected")) as directory:
        return generated(test_servers.config(path, "cpu"), directory)


@pytest.fixture(scope="module")
def halves(path: Path, layout: ExpertLayout) -> Iterator[Servers]:
    """Two servers with half of the experts each."""
    half = layout.num_experts // 2
    parts = range(half), range(half, layout.num_experts)
    with servers(path, layout, [dict.fromkeys(layout.layers, part) for part in parts]) as found:
        yield found


def config(path: Path, **scheduler: Any) -> WorkerConfig:
    return replace(test_servers.config(path, "cuda", **scheduler), transport="cuda_ipc")


def generated(config: WorkerConfig, directory: Directory, **hooks: Any) -> dict[int, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, seed=0)
    return served_worker.generated(config, directory, gpu_cases.prompts()[:4], params, **hooks)


@contextmanager
def on_device() -> Iterator[FileSharing]:
    with sanitized(), shared_memory() as files:
        yield files


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        {"inflight_batches": 2},
        {"schedule": "async"},
        {"schedule": "barrier"},
        {"combine": "partial"},
        {"schedule": "async", "combine": "partial"},
    ],
)
def test_tokens_are_those_of_the_host(
    path: Path, halves: Servers, expected: dict[int, list[int]], scheduler: dict[str, Any]
) -> None:
    with on_device() as files:
        assert generated(config(path, **scheduler), halves.directory) == expected
        assert len(files.exported) >= 3, "for the rows, and for the answers of each server"
