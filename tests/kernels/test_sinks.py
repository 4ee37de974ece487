"""Attention sinks: a score of each head beside those of the tokens, which has no value."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.native_kernels import CACHED, STORED, close_attention, same_bits
from tests.support.paged_steps import cache, tokens

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.attention import attention_plain
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
STEPS = {
    "decode": ([1] * 6, [1, 255, 256, 257, 700, 16]),
    "prefill": ([12, 1, 70], [12, 1, 70]),
    "both": ([1, 30, 1, 2, 40, 1], [700, 264, 17, 257, 300, 513]),
}
HEADS = [(1, 1), (6, 2), (50, 1)]
WINDOWS = [None, 6, 300]
SCALE = 0.2


def by_softmax(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sink: float) -> torch.Tensor:
    """One row [d] over tokens [t, d], in the words of the definition."""
    chances = torch.cat((SCALE * keys @ query, torch.tensor([sink]))).double().softmax(0)
    return chances[:-1] @ values.double()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_the_reference(heads: tuple[int, int], window: int | None) -> None:
    torch.manual_seed(0)
    batch = AttentionBatch.build(tokens([4, 1, 9, 1, 1], [30, 5, 9, 64, 17], block_size=8), 8)
    query, sinks = torch.randn(batch.batch.num_rows, heads[0], 16), 3 * torch.randn(heads[0])
    keys, values = cache(8, heads[1], 16), cache(8, heads[1], 16)
    given = (query, keys, values, batch, SCALE, window)
    wanted = attention_plain(*given, sinks=sinks)
    torch.testing.assert_close(REFERENCE.paged_attention(*given, sinks=sinks), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(wanted, attention_plain(*given), atol=1e-2)


def test_the_definition(native: Kernels) -> None:
    batch = AttentionBatch.build(tokens([1], [300], 8), 8)
    query, keys, values = torch.randn(1, 2, 16), cache(8, 2, 16), cache(8, 2, 16)
    blocks = torch.from_numpy(batch.batch.block_tables[0])
    own, seen = (part[blocks].flatten(0, 1)[:300] for part in (keys, values))
    for sinks in (torch.tensor([0.5, -2.0]), torch.tensor([9.0, 60.0]), torch.tensor([-300.0, 300.0])):
        wanted = [
            by_softmax(query[0, head], own[:, head], seen[:, head], float(sinks[head])) for head in (0, 1)
        ]
        for kernels in (REFERENCE, native):
            found = kernels.paged_attention(query, keys, values, batch, SCALE, sinks=sinks)
            torch.testing.assert_close(found[0].double(), torch.stack(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("step", STEPS)
def test_native_attention(native: Kernels, step: str, dtype: torch.dtype) -> None:
    for ((heads, kv_heads), window), block_size in zip(
        itertools.product(HEADS, WINDOWS), itertools.cycle((5, 16)), strict=False
    ):
        blocks = 2500 // block_size
        batch = AttentionBatch.build(tokens(*STEPS[step], block_size, num_blocks=blocks), block_size)
        query, sinks = torch.randn(batch.batch.num_rows, heads, 24), 3 * torch.randn(heads)
        keys, values = (cache(block_size, kv_heads, width, dtype, blocks) for width in (24, 33))
        close_attention(native, query, keys, values, batch, SCALE, window, sinks=sinks)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_has_the_same_bits_in_any_company(
    native: Kernels, window: int | None, dtype: torch.dtype
) -> None:
    """Its splits are joined by one task or by several, and the sink comes last."""
    lengths = [700, 300, 257, 40, 1]
    sinks, keys, values = 3 * torch.randn(6), cache(5, 2, 24, dtype), cache(5, 2, 24, dtype)
    query = torch.randn(len(lengths), 6, 24)
    whole = tokens([1] * len(lengths), lengths, 5)

    def answer(rows: list[int]) -> torch.Tensor:
        step = tokens([1] * len(rows), [lengths[row] for row in rows], 5)
        step.block_tables[:] = whole.block_tables[rows][:, : step.block_tables.shape[1]]
        batch = AttentionBatch.build(step, 5)
        return native.paged_attention(query[rows], keys, values, batch, SCALE, window, sinks=sinks)

    wanted = torch.cat([answer([row]) for row in range(len(lengths))])
    for threads, rows in itertools.product((1, 2, 5), ([0, 1, 2, 3, 4], [4, 0], [2, 3, 1])):
        native.set_threads(threads, False)
        assert same_bits(answer(rows), wanted[rows])


def test_no_sink_is_a_sink_far_below(native: Kernels) -> None:
    batch = AttentionBatch.build(tokens([1, 20], [300, 290], 8), 8)
    given = (torch.randn(21, 4, 16), cache(8, 2, 16), cache(8, 2, 16), batch, SCALE)
    without = native.paged_attention(*given)
    assert torch.equal(native.paged_attention(*given, sinks=torch.full((4,), -1e30)), without)
    assert not torch.equal(native.paged_attention(*given, sinks=torch.zeros(4)), without)


def test_sinks_that_do_not_fit_are_refused(native: Kernels) -> None:
    batch = AttentionBatch.build(tokens([1], [9], 8), 8)
    given = (torch.randn(1, 4, 16), cache(8, 2, 16), cache(8, 2, 16), batch, SCALE)
    for wrong in (torch.zeros(2), torch.zeros(4, 1), torch.zeros(4).bfloat16(), torch.zeros(8)[::2]):
        with pytest.raises((ValueError, TypeError)):
            native.paged_attention(*given, sinks=wrong)
