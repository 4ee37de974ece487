from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.kernels.table import REFERENCE, pick
from moesaic.planning.hardware import memory
from moesaic.planning.hardware.timing import Stopwatch


class Clock:
    """A clock that advances by a second at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_the_matrix_over_seconds(dtype: torch.dtype) -> None:
    for kernels in (pick("cpu", "auto"), REFERENCE):
        size = 5 * memory.COLUMNS * dtype.itemsize + 17
        found = memory.read(kernels, dtype, size, Stopwatch(0.5, Clock()))
        assert found == size - 17, "whole rows, read in a second"


def _caches(root: Path, *shared: str) -> Path:
    for number, processors in enumerate(shared):
        for index, size in ((0, "48K"), (3, "32768K")):
            folder = root / f"cpu{number}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{processors}\n" if index else f"{number}\n")
    return root


def test_far_more_than_the_caches_hold(tmp_path: Path) -> None:
    mib, gib = 1 << 20, 1 << 30
    twelve = _caches(tmp_path, *(f"{one}-{one + 1}" for one in range(12) for _ in range(2)))
    assert memory.choose_read_bytes(512 * mib, 24 * gib, twelve) == 3 * gib
    assert memory.choose_read_bytes(512 * mib, 8 * gib, twelve) == gib, "an eighth of what is available"
    assert memory.choose_read_bytes(512 * mib, 24 * gib, tmp_path / "none") == 512 * mib
    assert memory.choose_matrix_bytes(24 * gib, twelve) == 768 * mib
    assert memory.choose_matrix_bytes(8 * gib, twelve) == 256 * mib, "a 32nd of what is available"
    assert memory.choose_matrix_bytes(24 * gib, tmp_path / "none") == 0


def test_sizes_of_caches_as_the_kernel_writes_them(tmp_path: Path) -> None:
    _caches(tmp_path, "0-1", "0-1")
    for text, expected in (("2M", 2 << 20), ("1G\n", 1 << 30), ("4096", 4096)):
        for processor in ("cpu0", "cpu1"):
            (tmp_path / processor / "cache" / "index3" / "size").write_text(text)
        assert memory.choose_read_bytes(1, 1 << 60, tmp_path) == memory.TIMES_THE_CACHES * expected
