"""`moesaic serve --transport nvshmem` with all of its processes on the sanitizer's device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.commands import test_serve_gpu
from tests.support import gpu_cases

from moesaic.experts import exchange

FLAGS = (
    "--kernels", "triton", "--cudagraph-mode", "full", "--kv-cache-memory", "1MiB", "--transport", "nvshmem",
)  # fmt: skip


@pytest.mark.slow
def test_whole_steps_are_one_graph(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each process has a GPU of its own. The tokens are those of one process, before and in the job."""
    gpu_cases.write("mixtral-window", tmp_path)
    flags = *FLAGS, "--devices", "0,1,2", "--expert-servers", "2"
    with test_serve_gpu.serving(tmp_path, *flags, hardware=()) as server, ThreadPoolExecutor(4) as pool:
        prompts = test_serve_gpu.prompts()
        found = list(pool.map(lambda prompt: test_serve_gpu.asked(server, prompt), prompts))
        found += [test_serve_gpu.asked(server, prompts[0])]
    one_process = test_serve_gpu.in_memory(tmp_path)
    assert found == [*one_process, one_process[0]]
    assert exchange.WHOLE in capfd.readouterr().err
