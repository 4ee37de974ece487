"""`moesaic serve --transport cuda_ipc` with all of its processes on the sanitizer's device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.commands import test_serve_gpu
from tests.support import gpu_cases

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
