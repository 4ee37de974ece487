"""What is chosen on a GPU, and what is refused there, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import gpu_cases
from tests.support.fake_batch_server import line
from tests.support.gpu_sanitizer import GIB, NAME, sanitized

from moesaic import LLM
from moesaic.commands import cli, hardware
from moesaic.commands.options import MeasureHardware
from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware
from moesaic.planning.hardware import memory
from moesaic.planning.hardware.device import find_device
from moesaic.planning.hardware.measure import Effort, Measuring
from moesaic.planning.hardware.products import Sizes
from moesaic.runtime.cache_size import AUTO_SHARE_CUDA

TINY = Effort(
    seconds=1e-4,
    read_bytes=1 << 16,
    copy_bytes=1 << 12,
    products=Sizes(hidden=64, width=32, matrices=2, rows=(1, 4)),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    gpu_cases.write("mixtral-window", folder)
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_without_a_gpu_none_is_taken(path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(str(path), device="cuda")
    line = "--device: got 'cuda'; allowed: cpu (this machine or this build of torch has no CUDA)"
    assert str(raised.value) == line
    assert LLM(str(path), threads=1).info.device == "cpu"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"tensor_parallel_size": 3},
            "--kv-cache-memory: got 'auto'; allowed: a size, such as 4GiB, where several processes share a",
        ),
        ({"kernels": "portable"}, "--kernels: got 'portable'; allowed: auto, reference"),
        ({"pin_threads": True}, "--pin-threads: got True; allowed: the native kernels"),
    ],
    ids=["ranks that share one", "kernels", "pinned threads"],
)
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_what_does_not_go_with_a_gpu_is_refused(
    path: Path, device: str, settings: dict[str, Any], line: str
) -> None:
    with sanitized(), pytest.raises(ConfigError, match=f"^{re.escape(line)}") as raised:
        LLM(str(path), device=device, **settings)
    assert "\n" not in str(raised.value)


def test_the_cache_is_as_large_as_the_memory_that_is_free(path: Path) -> None:
    def info(free: int, **settings: Any) -> Any:
        with sanitized(free):
            return LLM(str(path), threads=1, **settings).info

    one = info(GIB, max_model_len=64, max_num_seqs=1)
    assert one.kv_tokens == 64, "what the requests need"
    block = one.kv_bytes // one.num_blocks
    some = info(20 * block, max_model_len=64)
    assert some.num_blocks == int(20 * AUTO_SHARE_CUDA)
    with pytest.raises(
        ConfigError, match=r"^--kv-cache-memory: auto \(.* MiB\) holds 32 tokens, less than one"
    ):
        info(3 * block, max_model_len=64)
    assert info(block, max_model_len=64, kv_cache_memory=str(9 * block)).num_blocks == 9, "as it is said"


def test_threads_are_those_of_the_cpu_beside_it(path: Path) -> None:
    before = torch.get_num_threads()
    with sanitized():
        assert LLM(str(path), threads=1).info.threads == 1
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "choose_read_bytes", lambda least, available: least)
    monkeypatch.setattr(memory, "choose_matrix_bytes", lambda available: 0)
    show: Callable[[str, int, int], None] = lambda *_: None  # noqa: E731
    with sanitized():
        device = find_device()
        assert device is not None and device.allocate_pinned(3).device.type == "cpu"
        found = Measuring(TINY, show, threads=1).gpu_over_ram(device, "box")
    assert (found.fast.name, found.fast.memory) == (NAME, 64 * GIB)
    assert found.slow.name == "RAM, 1 thread" and found.link.staging is not None


@pytest.mark.parametrize(("device", "measured"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_a_batch_is_planned_for_the_device_that_carries_it_out(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    measured: str,
) -> None:

    def measure(options: MeasureHardware, effort: Effort) -> Hardware:
        raise ConfigError(f"measured for {options.device}")

    monkeypatch.setattr(hardware, "measure", measure)
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("a", model="tiny", prompt=[5, 6], max_tokens=2))
    options = ["-i", str(asked), "-o", str(tmp_path / "out.jsonl"), "--served-model-name", "tiny"]
    options += ["--device", device, "--fast-memory", "1GiB"]
    with sanitized():
        assert cli.main(["run-batch", *options, "--model", str(path)]) == 2
    assert f"measured for {measured}" in capsys.readouterr().err
