"""Freed results leave room for the next results of the same size."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moesaic.kernels.native.memory import ALIGNMENT, LARGE, MEMORY, reuse_memory

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


def test_large_results_take_the_memory_of_those_that_ended() -> None:
    with reuse_memory():
        first, second = MEMORY.empty(2 * LARGE), MEMORY.empty(LARGE)
        where = first.data_ptr(), second.data_ptr()
        part = first[5:]
        del first, second
        third = MEMORY.empty(LARGE)
        assert third.data_ptr() == where[1], "a part of the first is still looked at"
        del part
        fifth, fourth = MEMORY.empty(LARGE), MEMORY.empty(LARGE + 64)
        assert fourth.data_ptr() == where[0] and fourth.shape == (LARGE + 64,)
        assert fifth.data_ptr() not in where, "what is twice as large is left for larger ones"
        assert MEMORY.freed_memory == []
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fifth.fill_, 1.0).result()  # may end in another thread too
            assert pool.submit(lambda: MEMORY.freed_memory).result() is None, "each thread has its own"
        del fifth
        assert [len(memory) for memory in MEMORY.freed_memory] == [4 * LARGE]
        held = MEMORY.freed_memory
    assert MEMORY.freed_memory is None and held == []
    assert third.fill_(2.0).sum() == 2 * LARGE, "results outlive the context"


def test_of_several_that_ended_the_smallest_is_taken() -> None:
    with reuse_memory():
        sizes = [LARGE, 4 * LARGE, 2 * LARGE]
        results = [MEMORY.empty(size) for size in sizes]
        where = [result.data_ptr() for result in results]
        results.clear()
        taken = [MEMORY.empty(size).data_ptr() for size in (LARGE + 1, LARGE)]
        assert taken == [where[2], where[0]]
