"""Paged attention in Triton against the slow reference: ragged steps, caches, windows, sinks, splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support import pairs
from tests.support.paged_steps import cache, fill, no_tokens, tokens, unused
from tests.support.triton_kernels import DEVICE, EXACT, ROUNDED, TRITON, close

from moesaic.gpu.triton import attention
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.attention import attention_plain
from moesaic.kernels.reference.cache import decode

pytestmark = pytest.mark.slow
STEPS = {
    "one row": ([1], [1]),
    "decode": ([1] * 4, [1, 70, 140, 16]),
    "prefill": ([12, 1, 40], [12, 1, 40]),
    "everything": ([1, 20, 1, 2], [75, 40, 17, 57]),
}
HEADS = [(1, 1), (4, 2), (6, 1), (20, 2)]
WIDTHS = [(24, 20), (16, 16), (7, 5)]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that contexts of a test are split."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("step", "dtype", "heads", "widths", "window", "block_size", "sunk"),
    pairs.cover(
        STEPS,
        (torch.float32, torch.bfloat16, torch.int8),
        HEADS,
        WIDTHS,
        (None, 1, 30),
        (1, 5, 16),
        (False, True),
    ),
)
def test_attention(
    step: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    widths: tuple[int, int],
    window: int | None,
    block_size: int,
    sunk: bool,
) -> None:
    rows = tokens(*STEPS[step], block_size, num_blocks=600)
    here, there = (AttentionBatch.build(rows, block_size, device) for device in ("cpu", DEVICE))
    query = torch.randn(rows.num_rows, heads[0], widths[0])
    keys, values = (cache(block_size, heads[1], width, dtype, 600) for width in widths)
    sinks = torch.randn(heads[0]) if sunk else None
    holes = unused(here, 600 * block_size)
    fill(keys, holes, torch.nan)
    fill(values, holes, torch.nan)
    moved = None if sinks is None else sinks.to(DEVICE)
    tolerance = ROUNDED if dtype is torch.bfloat16 else EXACT
    for value, width in ((values, widths[1]), (None, widths[1])):
        where = None if value is None else value.to(DEVICE)
        found = TRITON.paged_attention(
            query.to(DEVICE), keys.to(DEVICE), where, there, 0.2, window, width, moved
        )
        numbers = None if value is None else decode(value)
        wanted = attention_plain(query, decode(keys), numbers, here, 0.2, window, width, sinks)
        close(found, wanted, tolerance)


def test_a_step_without_rows() -> None:
    batch = AttentionBatch.build(no_tokens(), 4, DEVICE)
    keys = cache(4, 2, 8).to(DEVICE)
    assert TRITON.paged_attention(torch.zeros(0, 4, 8, device=DEVICE), keys, keys, batch, 0.3).shape == (
        0,
        4,
        8,
    )


@pytest.mark.parametrize("longest", [9, 70])
def test_a_row_without_context_sees_nothing_and_disturbs_nobody(longest: int) -> None:
    """A padded row, also where contexts are split."""
    keys = cache(8, 2, 16).to(DEVICE)
    query, rows = torch.randn(2, 4, 16, device=DEVICE), tokens([1, 1], [longest, 9], 8)
    wanted = TRITON.paged_attention(query, keys, keys, AttentionBatch.build(rows, 8, DEVICE), 0.3)
    padded = AttentionBatch.build(replace(rows, context_lens=np.array([longest, 0])), 8, DEVICE)
    found = TRITON.paged_attention(query, keys, keys, padded, 0.3)
    assert torch.equal(found[0], wanted[0]) and not found[1].any()


def test_the_same_step_gives_the_same_bits_alone_and_beside_others() -> None:
    keys, values = cache(8, 2, 16).to(DEVICE), cache(8, 2, 16).to(DEVICE)
    rows = tokens([1, 1, 1], [90, 40, 9], 8)
    query = torch.randn(3, 4, 16, device=DEVICE)
    together = TRITON.paged_attention(query, keys, values, AttentionBatch.build(rows, 8, DEVICE), 0.3)
    again = TRITON.paged_attention(query, keys, values, AttentionBatch.build(rows, 8, DEVICE), 0.3)
    assert torch.equal(together, again)
