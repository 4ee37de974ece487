"""What a cache stores and how much memory it takes, for every type."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic import LLM
from moesaic.kernels.reference.cache import decode
from moesaic.kernels.table import REFERENCE
from moesaic.models.kvcache.paged_kv import HUGE_PAGE, PagedKV, bytes_per_token
from moesaic.models.spec import KVLayout

GROUPED = KVLayout(3, 24, 20)
LATENT = KVLayout(1, 40, 33, value_in_key=True)
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def paged(layout: KVLayout, dtype: torch.dtype) -> PagedKV:
    return PagedKV(layout, 2, 5, 4, dtype, torch.device("cpu"), REFERENCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [GROUPED, LATENT])
def test_rows_are_found_again_and_nothing_else_changes(layout: KVLayout, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kv, slots = paged(layout, dtype), torch.tensor([7, 19, 0])
    key, value = torch.randn(3, layout.kv_heads, layout.key_width), None
    if not layout.value_in_key:
        value = torch.randn(3, layout.kv_heads, layout.value_width)
    kv.write(1, key, value, slots)
    for rows, stored in ((key, kv.keys(1)), (value, kv.values(1))):
        if rows is not None:
            found = decode(stored).flatten(0, 1)
            assert torch.allclose(found[slots], rows, atol=0.02)
            assert found.count_nonzero() == rows.numel() - int((found[slots] == 0).sum())
    assert not kv.keys(0).any() and not kv.values(0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [GROUPED, LATENT])
def test_a_token_takes_what_is_said(layout: KVLayout, dtype: torch.dtype) -> None:
    kv = paged(layout, dtype)
    parts = [kv.keys(0)] if layout.value_in_key else [kv.keys(0), kv.values(0)]
    assert 2 * sum(part.nbytes for part in parts) == bytes_per_token(layout, 2, dtype) * 5 * 4


def test_a_token_in_int8_has_a_scale_for_each_row() -> None:
    assert bytes_per_token(GROUPED, 2, torch.int8) == 2 * 3 * (24 + 4 + 20 + 4)
    assert bytes_per_token(LATENT, 2, torch.int8) == 2 * (40 + 4)


def test_the_same_memory_holds_about_four_times_as_many_tokens_in_int8() -> None:
    """The demo's heads have 32 numbers, so it holds 4 * 32 / 36 times as many tokens."""
    whole, narrow = (
        LLM("demo", threads=1, kv_cache_memory="32MiB", kv_cache_dtype=dtype).info
        for dtype in ("float32", "int8")
    )
    assert (whole.kv_dtype, narrow.kv_dtype) == ("float32", "int8")
    assert narrow.num_blocks / whole.num_blocks == pytest.approx(4 * 32 / 36, rel=1e-3)
    assert narrow.kv_bytes <= 32 << 20


def test_large_layers_begin_at_a_huge_page_and_hold_zeros() -> None:
    layout = KVLayout(kv_heads=2, key_width=64, value_width=48, value_in_key=False)
    kv = PagedKV(layout, 3, 700, 16, torch.bfloat16, torch.device("cpu"), REFERENCE)
    for layer in range(3):
        keys, values = kv.keys(layer), kv.values(layer)
        assert keys.shape == (700, 16, 2, 64) and values.shape == (700, 16, 2, 48)
        assert keys.data_ptr() % HUGE_PAGE == 0 and values.data_ptr() % HUGE_PAGE == 0
        assert not keys.any() and not values.any()
        keys.fill_(layer + 1), values.fill_(layer + 1)
    assert all(
        (kv.keys(layer) == layer + 1).all() and (kv.values(layer) == layer + 1).all() for layer in range(3)
    )


def in_memory(rows: torch.Tensor) -> float:
    """The share of a tensor's pages that are in memory, as the system reports it."""
    begin, end = rows.data_ptr(), rows.data_ptr() + rows.nbytes
    begin -= begin % mmap.PAGESIZE
    pages = (ctypes.c_ubyte * -(-(end - begin) // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pages)
    return sum(one & 1 for one in pages) / len(pages)


def large(at_once: bool) -> PagedKV:
    layout = KVLayout(kv_heads=2, key_width=64, value_width=64, value_in_key=False)
    return PagedKV(layout, 2, 4096, 16, torch.float32, torch.device("cpu"), REFERENCE, allocate_now=at_once)


def shares(kv: PagedKV) -> list[float]:
    return [in_memory(one) for layer in range(2) for one in (kv.keys(layer), kv.values(layer))]


def test_memory_is_taken_at_once_if_it_is_asked_for() -> None:
    kv = large(at_once=True)
    assert shares(kv) == [1.0] * 4 and not kv.keys(1).any()


def test_memory_is_taken_as_blocks_are_written() -> None:
    """In a process of its own: the allocator of this one may give memory that it had before."""
    code = "from tests.models.kvcache.test_paged_kv import large, shares; print(max(shares(large(False))))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1 / 4
