"""Attention of kernels that round: over a bf16 cache, queries and chances are rounded to bf16.

test_bitwise_attention.py and test_shared_prefix.py compare the bits of decode, prefill and shared prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.test_rounding import HERE, each_rounding, in_tiles
from tests.support.native_kernels import same_bits
from tests.support.paged_steps import cache, tokens

from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference.cache import encode

torch.set_num_threads(1)
BF16 = torch.bfloat16
ULP = 2.0**-8
"""The largest error of a rounded number, as a share of it."""


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    table.pick("cpu").set_threads(1, False)


def one_row(name: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of a query [d] to keys [t, d] and values [t, v] in a bf16 cache: [v]."""
    batch = AttentionBatch.build(tokens([1], [len(keys)], len(keys), num_blocks=1), len(keys))
    own_keys, own_values = (encode(part[None, :, None], BF16) for part in (keys, values))
    return table.pick("cpu", name).paged_attention(query[None, None], own_keys, own_values, batch, 1.0)[0, 0]


@each_rounding
def test_queries_are_rounded(name: str) -> None:
    batch = AttentionBatch.build(tokens([1, 40], [300, 290], 16), 16)
    query, keys, values = torch.randn(41, 4, 24), cache(16, 2, 24, BF16), cache(16, 2, 20, BF16)
    rounded = query.bfloat16().float()
    attend = table.pick("cpu", name).paged_attention
    assert same_bits(attend(query, keys, values, batch, 0.3), attend(rounded, keys, values, batch, 0.3))
    exact = table.pick("cpu", "avx512").paged_attention
    assert not same_bits(exact(query, keys, values, batch, 0.3), exact(rounded, keys, values, batch, 0.3))


@each_rounding
def test_chances_are_rounded_and_their_sum_is_not(name: str) -> None:
    for score in torch.linspace(-6, 0, 25).bfloat16().float():
        keys, values = torch.tensor([[0.0], [float(score)]]), torch.tensor([[0.0], [1.0]])
        chance = score.exp()
        found = one_row(name, torch.ones(1), keys, values)
        torch.testing.assert_close(found[0], chance.bfloat16() / (1 + chance), rtol=1e-6, atol=0)


@pytest.mark.skipif("amx_bf16" not in HERE, reason="no amx_bf16 on this CPU")
@pytest.mark.parametrize("length", [1, 31, 33, 70, 256])
def test_tiles_add_values_in_the_order_of_their_instruction(length: int) -> None:
    keys, values = torch.ones(length, 3), torch.randn(length, 37).bfloat16().float()
    values *= 2.0 ** torch.randint(-12, 12, (length, 1))
    found = one_row("amx_bf16", torch.zeros(3), keys, values)  # each chance is 1
    assert same_bits(found, in_tiles(torch.ones(1, length), values.t())[0] / length)


@each_rounding
def test_a_sum_that_became_too_small_has_no_sign(name: str) -> None:
    """Both sets make it zero with its sign. Chances of 0 for tokens of later rows would take that sign."""
    keys, values = torch.zeros(1, 64, 1, 8, dtype=BF16), torch.zeros(1, 64, 1, 8, dtype=BF16)
    values[0, :2, 0] = torch.tensor([1.0, -1.5])[:, None] * 2.0**-126
    attend = table.pick("cpu", name).paged_attention
    prefill = attend(
        torch.zeros(40, 4, 8),
        keys,
        values,
        AttentionBatch.build(tokens([40], [40], 64, num_blocks=1), 64),
        1.0,
    )
    decode = attend(
        torch.zeros(1, 4, 8), keys, values, AttentionBatch.build(tokens([1], [2], 64, num_blocks=1), 64), 1.0
    )
    assert same_bits(decode[0], prefill[1]) and same_bits(decode, torch.zeros(1, 4, 8))


def deviation(name: str, width: int, context: int, spread: float) -> float:
    """The error beside float64: root mean square, as a share of the results' size.

    spread: deviation of the scores. With a large one few tokens have most of the chances.
    """
    query = torch.randn(16, width) * spread
    keys, values = (torch.randn(context, width).bfloat16() for _ in range(2))
    batch = AttentionBatch.build(tokens([16], [context], 16, num_blocks=-(-context // 16)), 16)
    blocks = torch.from_numpy(batch.batch.block_tables[0])
    of_keys, of_values = (torch.zeros(len(blocks), 16, 1, width, dtype=BF16) for _ in range(2))
    for to, rows in ((of_keys, keys), (of_values, values)):
        padded = torch.zeros(len(blocks) * 16, 1, width, dtype=BF16)
        padded[:context, 0] = rows
        to[blocks] = padded.view(len(blocks), 16, 1, width)
    scale = width**-0.5
    found = table.pick("cpu", name).paged_attention(query[:, None], of_keys, of_values, batch, scale)[:, 0]
    scores = query.double() @ keys.double().t() * scale
    behind = torch.arange(context) > torch.arange(context - 16, context)[:, None]
    exact = scores.masked_fill(behind, -torch.inf).softmax(-1) @ values.double()
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


SHAPES = [(64, 100), (128, 1000), (128, 4096), (256, 700), (576, 700)]
"""Numbers of a head, and tokens of the context."""


@each_rounding
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize(("width", "context"), SHAPES)
def test_the_error_of_attention(name: str, width: int, context: int, spread: float) -> None:
    """A rounded query moves every score, the more the larger scores are. Long sums add next to nothing."""
    found = deviation(name, width, context, spread)
    assert ULP / 10 < found < ULP * max(1.0, spread / 2)
    assert deviation("avx512", width, context, spread) < 1e-5
