"""Native attention against the reference: groups of heads, windows, splits, ragged steps, every cache."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.native_kernels import CACHED, STORED, close, close_attention
from tests.support.paged_steps import cache, fill, no_tokens, tokens, unused

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.attention import attention_plain
from moesaic.kernels.table import Kernels

torch.set_num_threads(1)
STEPS = {
    "one row": ([1], [1]),
    "decode": ([1] * 6, [1, 255, 256, 257, 700, 16]),
    "prefill": ([12, 1, 70], [12, 1, 70]),
    "chunks at splits": ([3, 4, 2], [257, 512, 256]),
    "everything": ([1, 30, 1, 2, 300, 1], [700, 264, 17, 257, 300, 513]),
}
HEADS = [(1, 1), (4, 4), (6, 2), (8, 2), (16, 2), (50, 1)]
"""Numbers of query heads and key heads. The last ones have more query heads than one task computes for the
same keys.
"""
WIDTHS = [(1, 1), (7, 5), (16, 16), (64, 33), (80, 128)]
"""Widths of keys and of values."""
WINDOWS = [None, 1, 6, 300]
BLOCKS = [1, 5, 16]
CASES = random.Random(0).sample(list(itertools.product(HEADS, WIDTHS, WINDOWS, BLOCKS)), 60)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("step", STEPS)
def test_attention(native: Kernels, step: str, dtype: torch.dtype) -> None:
    for (query_heads, kv_heads), (key_width, value_width), window, block_size in CASES[
        list(STEPS).index(step) :: 5
    ]:
        blocks = 2500 // block_size
        batch = AttentionBatch.build(tokens(*STEPS[step], block_size, num_blocks=blocks), block_size)
        query = torch.randn(batch.batch.num_rows, query_heads, key_width)
        keys, values = (
            cache(block_size, kv_heads, width, dtype, blocks) for width in (key_width, value_width)
        )
        close_attention(native, query, keys, values, batch, 0.2, window)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize(
    ("heads", "key_width", "value_width"), [(1, 576, 512), (16, 576, 512), (3, 20, 16), (5, 9, 7)]
)
def test_the_value_can_lie_in_the_key(
    native: Kernels, heads: int, key_width: int, value_width: int, dtype: torch.dtype
) -> None:
    for block_size, window in ((16, None), (5, 300)):
        batch = AttentionBatch.build(tokens([1, 9, 1], [300, 20, 5], block_size), block_size)
        query, keys = torch.randn(11, heads, key_width), cache(block_size, 1, key_width, dtype)
        options = (batch, 0.05, window, value_width)
        found = close_attention(native, query, keys, None, *options, plain=attention_plain)
        if dtype is not torch.int8:  # the scale is behind the key
            shown = keys[..., :value_width]
            assert torch.equal(native.paged_attention(query, keys, shown, batch, 0.05, window), found)


@pytest.mark.parametrize("dtype", STORED)
def test_every_number_of_cached_tokens(native: Kernels, dtype: torch.dtype) -> None:
    keys, values = cache(16, 2, 24, dtype), cache(16, 2, 24, dtype)
    for length in (*range(1, 36), *range(250, 262), *range(508, 516)):
        batch = AttentionBatch.build(tokens([1, min(length, 3)], [length, length], 16), 16)
        query = torch.randn(batch.batch.num_rows, 4, 24)
        close_attention(native, query, keys, values, batch, 0.3, plain=attention_plain)


@pytest.mark.parametrize("dtype", STORED)
def test_every_window(native: Kernels, dtype: torch.dtype) -> None:
    keys, values = cache(5, 1, 9, dtype), cache(5, 1, 9, dtype)
    batch = AttentionBatch.build(tokens([1, 20, 1], [300, 290, 7], 5), 5)
    query = torch.randn(22, 2, 9)
    for window in (*range(1, 40), 255, 256, 257, 299, 300, 301):
        close_attention(native, query, keys, values, batch, 0.3, window, plain=attention_plain)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", CACHED)
def test_garbage_beyond_a_context_never_leaks(native: Kernels, dtype: torch.dtype, garbage: float) -> None:
    for window, in_key in itertools.product((None, 6), (False, True)):
        batch = AttentionBatch.build(tokens([1, 1, 3, 20, 1], [5, 300, 6, 270, 1], 8), 8)
        query, keys, values = torch.randn(26, 4, 24), cache(8, 2, 24, dtype), cache(8, 2, 20, dtype)
        options = (batch, 0.3, window, 20)
        wanted = native.paged_attention(query, keys, None if in_key else values, *options)
        holes = unused(batch, len(keys) * 8)
        fill(keys, holes, garbage)
        fill(values, holes, garbage)
        assert torch.equal(native.paged_attention(query, keys, None if in_key else values, *options), wanted)


@pytest.mark.parametrize("dtype", STORED)
def test_tokens_that_a_window_has_left_are_not_read(native: Kernels, dtype: torch.dtype) -> None:
    batch = AttentionBatch.build(tokens([1, 1], [300, 40], 8), 8)
    query, keys, values = torch.randn(2, 4, 24), cache(8, 2, 24, dtype), cache(8, 2, 24, dtype)
    wanted = native.paged_attention(query, keys, values, batch, 0.3, 10)
    for blocks, length in zip(batch.batch.block_tables, (300, 40), strict=True):
        left = torch.from_numpy(blocks)[: (length - 10) // 8]
        keys[left] = values[left] = torch.nan
    assert torch.equal(native.paged_attention(query, keys, values, batch, 0.3, 10), wanted)


def test_rows_see_only_their_own_past(native: Kernels) -> None:
    batch = AttentionBatch.build(tokens([6, 1], [6, 9], 4), 4)
    query, keys, values = torch.randn(7, 2, 8), cache(4, 2, 8), cache(4, 2, 8)
    before = native.paged_attention(query, keys, values, batch, 0.3)
    keys.flatten(0, 1)[batch.slots[3]] += 5.0
    values.flatten(0, 1)[batch.slots[3]] += 5.0
    after = native.paged_attention(query, keys, values, batch, 0.3)
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, True, True, True, False]


def test_scores_far_apart(native: Kernels) -> None:
    batch = AttentionBatch.build(tokens([1, 20], [700, 300], 16), 16)
    query = torch.randn(21, 4, 16)
    for dtype, scale in itertools.product(STORED, (1e-8, 30.0, 1000.0)):
        keys, values = cache(16, 2, 16, dtype), cache(16, 2, 16, dtype)
        close_attention(native, query, keys, values, batch, scale, tolerance=1e-3)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("length", [1, 20, 300])
@pytest.mark.parametrize("where", ["query", "keys", "values"])
def test_what_is_not_a_number_stays_so(native: Kernels, where: str, length: int, dtype: torch.dtype) -> None:
    batch = AttentionBatch.build(tokens([1, 1], [length, 9], 4), 4)
    parts = {"query": torch.randn(2, 2, 8), "keys": cache(4, 2, 8, dtype), "values": cache(4, 2, 8, dtype)}
    if where == "query":
        parts[where][0] = torch.nan
    else:
        fill(parts[where], batch.slots[:1], torch.nan)
    found = native.paged_attention(**parts, batch=batch, scale=0.3)
    assert found[0].isnan().all() and not found[1].isnan().any()


def test_no_rows_are_no_error(native: Kernels) -> None:
    empty = AttentionBatch.build(no_tokens(), 4)
    found = native.paged_attention(torch.zeros(0, 2, 8), cache(4, 2, 8), cache(4, 2, 8), empty, 0.3)
    assert found.shape == (0, 2, 8)


@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_without_rows_are_passed_over(native: Kernels, threads: int) -> None:
    native.set_threads(threads, False)
    batch = AttentionBatch.build(tokens([0, 2, 0, 1, 0], [600, 8, 3, 300, 1], 4), 4)
    query, keys, values = torch.randn(3, 2, 8), cache(4, 2, 8), cache(4, 2, 8)
    wanted = attention_plain(query, keys, values, batch, 0.3)
    close(native.paged_attention(query, keys, values, batch, 0.3), wanted)


def test_tables_may_be_any_integers_in_any_layout(native: Kernels) -> None:
    rows = tokens([1, 3], [300, 20], 16)
    query, keys, values = torch.randn(4, 4, 8), cache(16, 2, 8), cache(16, 2, 8)
    wanted = native.paged_attention(query, keys, values, AttentionBatch.build(rows, 16), 0.3)
    narrow = replace(
        rows,
        block_tables=np.repeat(rows.block_tables, 2, axis=1).astype(np.int32)[:, ::2],
        context_lens=rows.context_lens.astype(np.int32),
    )
    batch = AttentionBatch.build(narrow, 16)
    assert torch.equal(native.paged_attention(query, keys, values, batch, 0.3), wanted)
