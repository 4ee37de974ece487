"""The fast attention against the plain one, over ragged batches and every kind of cache."""

from __future__ import annotations

import pytest
import torch
from tests.support.paged_steps import NUM_BLOCKS, cache, fill, no_tokens, tokens, unused

from moesaic.kernels import batch as batches
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference import attention
from moesaic.kernels.reference.attention import attention_plain, paged_attention
from moesaic.kernels.reference.cache import decode

torch.set_num_threads(1)

SHAPES = {
    "decode": ([1] * 5, [1, 7, 8, 9, 200]),
    "prefill": ([12, 1, 3], [12, 1, 3]),
    "chunks and single rows": ([4, 1, 9, 1, 1], [30, 5, 9, 64, 17]),
    "one long among short": ([1] * 12, [3] * 11 + [600]),
}


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fast_is_plain(shape: str, heads: tuple[int, int], window: int | None) -> None:
    torch.manual_seed(0)
    batch = AttentionBatch.build(tokens(*SHAPES[shape], block_size=8), 8)
    query = torch.randn(batch.batch.num_rows, heads[0], 16)
    keys, values = cache(8, heads[1], 16), cache(8, heads[1], 16)
    wanted = attention_plain(query, keys, values, batch, 0.3, window)
    found = paged_attention(query, keys, values, batch, 0.3, window)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_value_can_lie_in_the_key(shape: str) -> None:
    torch.manual_seed(0)
    batch = AttentionBatch.build(tokens(*SHAPES[shape], block_size=5), 5)
    query, keys = torch.randn(batch.batch.num_rows, 3, 20), cache(5, 1, 20)
    found = paged_attention(query, keys, None, batch, 0.2, value_width=16)
    assert found.shape == (batch.batch.num_rows, 3, 16)
    wanted = paged_attention(query, keys, keys[..., :16], batch, 0.2)
    torch.testing.assert_close(found, wanted)
    plain = attention_plain(query, keys, None, batch, 0.2, value_width=16)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_narrow_caches_are_widened_in_the_gather(dtype: torch.dtype) -> None:
    batch = AttentionBatch.build(tokens([3, 1], [11, 6], 4), 4)
    query, keys, values = torch.randn(4, 4, 8), cache(4, 2, 8, dtype), cache(4, 2, 8, dtype)
    found = paged_attention(query, keys, values, batch, 0.3)
    assert found.dtype == torch.float32
    wide = paged_attention(query, decode(keys), decode(values), batch, 0.3)
    torch.testing.assert_close(found, wide)
    found = paged_attention(query, keys, None, batch, 0.3, value_width=5)
    torch.testing.assert_close(found, paged_attention(query, decode(keys), None, batch, 0.3, value_width=5))


@pytest.mark.parametrize("window", [None, 9])
def test_long_chunks_are_split(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = AttentionBatch.build(tokens([50], [90], 8), 8)
    query, keys, values = torch.randn(50, 4, 8), cache(8, 2, 8), cache(8, 2, 8)
    whole = paged_attention(query, keys, values, batch, 0.3, window)
    monkeypatch.setattr(attention, "SCORE_NUMBERS", 7 * 90 * 2)
    torch.testing.assert_close(paged_attention(query, keys, values, batch, 0.3, window), whole)


def test_rows_see_only_their_own_past() -> None:
    batch = AttentionBatch.build(tokens([6, 1], [6, 9], 4), 4)
    query, keys, values = torch.randn(7, 2, 8), cache(4, 2, 8), cache(4, 2, 8)
    before = paged_attention(query, keys, values, batch, 0.3)
    slot = batch.slots[3]
    keys.flatten(0, 1)[slot] += 5.0
    values.flatten(0, 1)[slot] += 5.0
    after = paged_attention(query, keys, values, batch, 0.3)
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_garbage_beyond_a_context_never_leaks(dtype: torch.dtype) -> None:
    batch = AttentionBatch.build(tokens([1, 1, 3], [5, 30, 6], 8), 8)
    query, keys, values = torch.randn(5, 2, 8), cache(8, 2, 8, dtype), cache(8, 2, 8, dtype)
    wanted = paged_attention(query, keys, values, batch, 0.3)
    garbage = unused(batch, NUM_BLOCKS * 8)
    fill(keys, garbage, 1e30)
    fill(values, garbage, 1e30)
    assert torch.equal(paged_attention(query, keys, values, batch, 0.3), wanted)


def test_slots_follow_the_block_tables() -> None:
    rows = tokens([2, 1], [6, 5], 4)
    batch = AttentionBatch.build(rows, 4)
    first, second = rows.block_tables
    assert batch.slots.tolist() == [first[1] * 4 + 0, first[1] * 4 + 1, second[1] * 4 + 0]
    assert (batch.chunks[0].first, batch.chunks[0].length) == (4, 6)


def test_decode_groups_bound_padding_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [16] * 20 + [3000]
    batch = AttentionBatch.build(tokens([1] * 21, contexts, 16), 16)
    assert [group.blocks.shape for group in batch.decode] == [(20, 1)]
    assert [(chunk.start, chunk.stop, chunk.length) for chunk in batch.chunks] == [(20, 21, 3000)]
    monkeypatch.setattr(batches, "GROUP_TOKENS", 64)
    batch = AttentionBatch.build(tokens([1] * 21, contexts, 16), 16)
    assert max(group.blocks.numel() for group in batch.decode) * 16 <= 64
    assert sorted(row for group in batch.decode for row in group.rows.tolist()) == list(range(20))


def test_an_empty_step_is_no_error() -> None:
    empty = AttentionBatch.build(no_tokens(), 4)
    found = paged_attention(torch.zeros(0, 2, 8), cache(4, 2, 8), cache(4, 2, 8), empty, 0.3)
    assert found.shape == (0, 2, 8)
