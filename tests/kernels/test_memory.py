"""Results that are freed leave room for the next ones of their size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moesaic.kernels.native.memory import ALIGNMENT, LARGE, MEMORY

ROLLING = """
import sys
import torch
from moesaic.kernels.native.memory import MEMORY

def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

before, held, small = anonymous(), [], []
for turn in range(40):  # never more than four, each of them written
    held = [*held[-2:], MEMORY.empty(2048, 1024).fill_(turn)]
    small.append(bytearray(4096))
print((anonymous() - before) >> 20)
"""


@pytest.mark.parametrize("size", [0, 64, LARGE - 64, LARGE, LARGE + 64])
def test_a_result_is_dense_and_starts_where_vectors_do(size: int) -> None:
    tensor = MEMORY.empty(size // 64, 8, dtype=torch.int64)
    assert tensor.shape == (size // 64, 8) and tensor.dtype == torch.int64 and tensor.is_contiguous()
    assert tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_results_that_come_and_go_take_no_more_memory_than_live_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", ROLLING], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 44, "32 MiB live; with torch's own allocation 88 were taken"
