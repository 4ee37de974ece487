"""A cache that gives memory back keeps the blocks that stay, and has zeros where it takes memory again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.kernels.table import REFERENCE
from moesaic.models.kvcache.elastic_kv import ElasticKV, list_lines
from moesaic.models.kvcache.paged_kv import PagedKV, bytes_per_token
from moesaic.models.pages import HUGE_PAGE, PAGE, ReservedMemory
from moesaic.models.spec import KVLayout

GROUPED = KVLayout(3, 24, 20)
LATENT = KVLayout(1, 40, 33, value_in_key=True)
LAYERS, BLOCKS, SIZE = 3, 40, 4


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def fill(kv: PagedKV, layout: KVLayout, block: int) -> None:
    for layer in range(LAYERS):
        slots = torch.arange(block * SIZE, (block + 1) * SIZE)
        key = torch.full((SIZE, layout.kv_heads, layout.key_width), float(block + layer + 1))
        value = None if layout.value_in_key else key[..., : layout.value_width].contiguous()
        kv.write(layer, key, value, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("layout", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_blocks_that_stay_are_kept_and_new_ones_are_zeros(layout: KVLayout, dtype: torch.dtype) -> None:
    elastic = ElasticKV(layout, LAYERS, BLOCKS, SIZE, dtype, REFERENCE, PAGE)
    plain = PagedKV(layout, LAYERS, BLOCKS, SIZE, dtype, torch.device("cpu"), REFERENCE)
    assert elastic.block_bytes == plain.block_bytes == sum(list_lines(layout, LAYERS, SIZE, dtype))
    assert elastic.block_bytes == SIZE * bytes_per_token(layout, LAYERS, dtype)
    for block in range(BLOCKS):
        fill(elastic, layout, block)
        fill(plain, layout, block)
    least = BLOCKS
    for count in (17, 30, 5, 6, BLOCKS, BLOCKS):
        elastic.resize(count)
        least = min(least, count)
        for layer in range(LAYERS):
            assert torch.equal(elastic.keys(layer)[:least], plain.keys(layer)[:least])
            assert torch.equal(elastic.values(layer)[:least], plain.values(layer)[:least])
    page_blocks = -(-PAGE // min(list_lines(layout, LAYERS, SIZE, dtype)))
    assert not elastic.keys(0)[5 + page_blocks :].any()


@pytest.mark.parametrize("count", [0, BLOCKS + 1])
def test_a_cache_has_some_blocks_and_no_more_than_at_the_start(count: int) -> None:
    kv = ElasticKV(GROUPED, LAYERS, BLOCKS, SIZE, torch.float32, REFERENCE, PAGE)
    with pytest.raises(ValueError, match="of at most 40"):
        kv.resize(count)


def test_memory_is_given_back_and_taken_again() -> None:
    layout = KVLayout(8, 64, 64)
    before = resident()
    kv = ElasticKV(layout, 4, 1024, 16, torch.float32, REFERENCE, PAGE)
    whole = 4 * 1024 * 16 * 2 * 8 * 64 * 4
    slack = 8 << 20
    for share in (1, 8, 2, 1):
        kv.resize(1024 // share)
        assert abs(resident() - before - whole // share) < slack


@pytest.mark.parametrize("page", [PAGE, HUGE_PAGE])
def test_only_whole_pages_are_given_back(page: int) -> None:
    memory = ReservedMemory(4 * page, page)
    assert memory.array.ctypes.data % page == 0
    memory.array[:] = 1
    memory.give_back(page - 1, 3 * page + 1)
    assert memory.array[:page].all() and memory.array[3 * page :].all()
    assert not memory.array[page : 3 * page].any()
    memory.give_back(5, 6)
    assert memory.array[:page].all()
