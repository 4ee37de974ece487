"""Caches and weights of more than 2**31 numbers. What nobody touches takes no memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support import delta_steps
from tests.support.triton_kernels import DEVICE, IS_INTERPRETED, TRITON, close

from moesaic.core.tokens import TokenBatch
from moesaic.core.weight_types import row_bytes
from moesaic.gpu.triton import dense
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.states import StateSizes

FAR = 1 << 31
BLOCK, WIDTH, CONTEXT = 16, 60, 20


def step(blocks: list[int]) -> AttentionBatch:
    """A decode step of a sequence whose keys are in these blocks."""
    batch = TokenBatch(
        token_ids=np.zeros(1, np.int64), positions=np.array([CONTEXT - 1]), query_starts=np.array([0, 1]),
        context_lens=np.array([CONTEXT]), block_tables=np.array([blocks]), logit_rows=np.arange(1),
    )  # fmt: skip
    return AttentionBatch.build(batch, BLOCK, DEVICE)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_keys_at_the_end_of_a_large_cache(dtype: torch.dtype) -> None:
    """They give the bits that they give at the beginning of a small one."""
    line, rows = stored_width(WIDTH, dtype), torch.randn(CONTEXT, 1, WIDTH, device=DEVICE)
    query, found = torch.randn(1, 2, WIDTH, device=DEVICE), []
    for blocks in (4, FAR // (BLOCK * line) + 4):
        cache = torch.empty(blocks, BLOCK, 1, line, dtype=dtype, device=DEVICE)
        last = blocks - 2
        slots = torch.arange(CONTEXT, device=DEVICE) + last * BLOCK
        TRITON.store(cache, rows, slots)
        found.append(TRITON.paged_attention(query, cache, cache, step([last, last + 1]), 0.3))
        assert cache.numel() > FAR or blocks == 4
    assert torch.equal(*found) and found[0].any()


def test_rows_at_the_end_of_a_large_matrix() -> None:
    line = row_bytes("int8", 64)
    stored = torch.empty(FAR // line + 8, line, dtype=torch.uint8, device=DEVICE)
    stored[:3], stored[-3:] = (torch.arange(3 * line, device=DEVICE).view(3, line) % 100,) * 2
    matrix = QuantizedMatrix(stored, 64, "int8")
    first, last = (dense.embed(matrix, torch.arange(3, device=DEVICE) + at) for at in (0, len(matrix) - 3))
    assert torch.equal(first, last)


@pytest.mark.skipif(not IS_INTERPRETED, reason="these states are on the CPU")
def test_states_at_the_end_of_a_large_cache() -> None:
    """A page has the state of a sequence, and a seat its last rows."""
    sizes = StateSizes(1, 2, 64, 64, 4)
    page = sizes.value_heads * sizes.key_width * sizes.value_width
    found = []
    for pages in (4, FAR // page + 4):
        states = delta_steps.empty_states(sizes, 4, 4, garbage=0.0)
        of_pages = torch.empty(pages, *states.pages.shape[1:])
        of_pages[pages - 2] = torch.arange(page).view(of_pages.shape[1:]) / page
        states = type(states)(**(vars(states) | {"pages": of_pages}))
        batch = TokenBatch(
            token_ids=np.zeros(1, np.int64), positions=np.array([0]), query_starts=np.array([0, 1]),
            context_lens=np.array([1]), block_tables=np.zeros((1, 1), np.int64), logit_rows=np.arange(1),
            states=np.array([[pages - 2, 0, pages - 1, 1]]),
        )  # fmt: skip
        torch.manual_seed(1)
        mixed, gates = torch.randn(1, sizes.channels), torch.randn(1, 2 * sizes.value_heads)
        heads = torch.rand(2, sizes.value_heads)
        found.append(TRITON.delta(mixed, gates, -heads[0], heads[1], states, AttentionBatch.build(batch, 16)))
    close(*found)
    assert found[0].any()
