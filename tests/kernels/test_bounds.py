"""No kernel reads behind the last number of an input. A mapped file may end there, and the read would end the
process. The sanitizers check writes and other reads (see CONTRIBUTING.md).
"""

from __future__ import annotations

import mmap

import pytest
import torch
from tests.support.guarded import Guarded
from tests.support.native_kernels import CACHED, STORED, close, close_attention, close_mlp, met
from tests.support.paged_steps import tokens

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.cache import encode
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


def draw(guarded: Guarded, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return guarded(encode(torch.randn(shape), dtype))


def test_the_guard_guards(guarded: Guarded) -> None:
    tensor = guarded(torch.arange(5.0))
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (tensor.data_ptr() + 20) % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("width", [1, 5, 31, 33, 64, 1025])
def test_products(native: Kernels, guarded: Guarded, width: int, dtype: torch.dtype) -> None:
    for count, columns in ((1, 1), (1, 9), (3, 7), (5, 65), (8, 3), (50, 33), (100, 33)):
        rows, weight, bias = (
            draw(guarded, count, width),
            draw(guarded, columns, width, dtype=dtype),
            draw(guarded, columns),
        )
        seen = met(native, rows, weight)
        close(native.linear(rows, weight, bias), REFERENCE.linear(seen, weight.float(), bias))
        down = draw(guarded, width, columns, dtype=dtype)
        close_mlp(native, native.gated_mlp(rows, weight, weight, down), rows, (weight, weight, down))
        heads, up = draw(guarded, count, 2, width), draw(guarded, 2, width, columns, dtype=dtype)
        seen = met(native, heads, up)
        close(native.head_linear(heads, up), REFERENCE.head_linear(seen, up.float()))
        across = draw(guarded, 2, columns, width, dtype=dtype).transpose(1, 2)
        seen = met(native, heads, across)
        close(native.head_linear(heads, across), REFERENCE.head_linear(seen, across.float()))
        table, ids = (
            ExpertWeights((weight, weight), (weight, weight), (down, down)),
            guarded(torch.ones(count, 1).long()),
        )
        native.experts(table, rows, ids)
        native.gate(rows, weight.float(), Gating(1, True))


@pytest.mark.parametrize("width", [2, 6, 30, 34, 66])
def test_rows(native: Kernels, guarded: Guarded, width: int) -> None:
    for count in (1, 3, 8):
        rows, others, weight = draw(guarded, count, width), draw(guarded, count, width), draw(guarded, width)
        native.rms_norm(rows, weight, 1e-6)
        native.add_norm(rows, others, weight, 1e-6)
        native.merge(rows, others, draw(guarded, count, 2, width), draw(guarded, count, 2))
        native.sigmoid_gate(rows, draw(guarded, 1, width), others)
        native.clip(rows, 0.5)
        bits = guarded(torch.full((count, (width + 31) // 32), 5, dtype=torch.int32))
        native.mask_tokens(others, guarded(torch.arange(count)), bits)
        heads, places = draw(guarded, count, 3, width), guarded(torch.full((count,), 4))
        cosine, sine = draw(guarded, 5, width // 2), draw(guarded, 5, width // 2)
        for interleaved in (False, True):
            native.rope(heads, cosine, sine, places, interleaved, weight, 1e-6)
        native.join(heads, draw(guarded, count, 3, width))
        for dtype in STORED:
            native.embed(draw(guarded, 5, width, dtype=dtype), places)
        for dtype in CACHED:
            native.store(draw(guarded, 5, 1, 3, width, dtype=dtype), heads, guarded(torch.arange(count) % 5))


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize(
    ("heads", "key_width", "value_width"), [(1, 1, 1), (2, 5, 33), (1, 40, 24), (3, 65, 31)]
)
def test_attention(
    native: Kernels, guarded: Guarded, heads: int, key_width: int, value_width: int, dtype: torch.dtype
) -> None:
    for block_size, contexts in ((1, [1, 3]), (5, [7, 3]), (16, [300, 20])):
        blocks = sum(-(-length // block_size) for length in contexts)
        batch = AttentionBatch.build(tokens([1, 2], contexts, block_size, num_blocks=blocks), block_size)
        query = draw(guarded, 3, 2 * heads, key_width)
        keys, values = (
            draw(guarded, blocks, block_size, heads, width, dtype=dtype) for width in (key_width, value_width)
        )
        close_attention(native, query, keys, values, batch, 0.3)
        if value_width <= key_width:
            native.paged_attention(query, keys, None, batch, 0.3, None, value_width)
