"""Measures how fast weights are read from memory: one row times a matrix that is larger than any cache.

A decode step of one request reads every weight in this way, with the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.kernels.table import Kernels
from moesaic.planning.hardware.timing import Stopwatch

COLUMNS = 4096
"""Number of columns of the matrix, a typical hidden size."""
TIMES_THE_CACHES = 8
_CACHES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Reading:
    """The measured speed of reading memory."""

    threads: int
    dtype: str
    """Dtype of the matrix."""
    bandwidth: float
    """Measured bytes/s."""


def read(kernels: Kernels, dtype: torch.dtype, size: int, stopwatch: Stopwatch, device: str = "cpu") -> float:
    """Bytes/s of reading a matrix of about `size` bytes, with as many threads as the kernels have."""
    rows = max(1, size // (COLUMNS * dtype.itemsize))
    # Written to, since zeros would share one page.
    matrix = torch.full((rows, COLUMNS), 0.01, dtype=dtype, device=device)
    row = torch.full((1, COLUMNS), 0.01, device=device)
    return matrix.nbytes / stopwatch.seconds(lambda: kernels.linear(row, matrix))


def choose_read_bytes(least: int, available: int, caches: Path = _CACHES) -> int:
    """Number of bytes to read: `least`, or more if caches are large, but at most an eighth of `available`.

    Example: with 12 last-level caches of 32 MiB and 24 GiB available, it is 8 * 12 * 32 MiB = 3 GiB.
    """
    return max(1, min(max(least, TIMES_THE_CACHES * _cache_bytes(caches)), available // 8))


def choose_matrix_bytes(available: int, caches: Path = _CACHES) -> int:
    """Size of matrices that products with few rows do not find in a cache, at most a 32nd of `available`.

    Example: with a last-level cache of 260 MiB and 24 GiB available, it is 520 MiB.
    """
    return min(2 * _cache_bytes(caches), available // 32)


def _cache_bytes(root: Path) -> int:
    """Bytes of all last-level caches together, or 0 if the kernel does not list them."""
    sizes: dict[str, int] = {}
    for processor in root.glob("cpu[0-9]*"):
        levels = sorted(processor.glob("cache/index[0-9]*"))
        if levels:
            processors = (levels[-1] / "shared_cpu_list").read_text(encoding="utf-8").strip()
            sizes[processors] = _size((levels[-1] / "size").read_text(encoding="utf-8"))
    return sum(sizes.values())


def _size(text: str) -> int:
    """Parse a size of the kernel: '32768K' -> 33554432."""
    text = text.strip()
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
