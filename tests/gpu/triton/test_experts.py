"""The routed experts in Triton against the slow reference: types of weights, biases, uneven groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.triton_kernels import DEVICE, EXACT, ROUNDED, TRITON, close

from moesaic.core.experts import SILU, Activation
from moesaic.core.weight_types import QUANTIZATIONS, join_dtypes
from moesaic.gpu.triton import experts as module
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.quantized_layout import TABLES, pack
from moesaic.kernels.reference.experts import experts_plain
from moesaic.kernels.table import REFERENCE
from moesaic.kernels.weights import ExpertWeights

pytestmark = pytest.mark.slow
GPT_OSS = Activation(1.702, 1.0, 7.0)


def floats(count: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(rows, columns).mul_(columns**-0.5).to(dtype) for _ in range(count))


def moved(weights: ExpertWeights) -> ExpertWeights:
    return weights.with_parts(
        [tuple(None if one is None else one.to(DEVICE) for one in part) for part in weights.parts]
    )


def same(weights: ExpertWeights, hidden: torch.Tensor, ids: torch.Tensor, tolerance: float) -> None:
    found = TRITON.experts(moved(weights), hidden.to(DEVICE), ids.to(DEVICE))
    close(found, experts_plain(weights, hidden, ids), tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, EXACT), (torch.bfloat16, 4 * ROUNDED), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("biases", [False, True])
def test_types(dtype: torch.dtype, tolerance: float, biases: bool) -> None:
    parts = [floats(5, 40, 70, dtype), floats(5, 40, 70, dtype), floats(5, 70, 40, dtype)]
    if biases:
        parts += [tuple(torch.randn(size) for _ in range(5)) for size in (40, 40, 70)]
    weights = ExpertWeights(*parts, activation=GPT_OSS if biases else SILU)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    same(weights, torch.randn(9, 70), ids, tolerance)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=10)
def test_uneven_groups(tokens: int, top_k: int, experts: int, seed: int) -> None:
    """Experts without rows, and one with all of them."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(
        0, max(1, seed % (experts + 1)), (tokens, min(top_k, experts)), generator=generator
    )
    weights = ExpertWeights(*(floats(experts, *size, torch.float32) for size in ((6, 10), (6, 10), (10, 6))))
    same(weights, torch.randn(tokens, 10, generator=generator), chosen, EXACT)


def test_many_rows_and_none() -> None:
    weights = ExpertWeights(*(floats(2, *size, torch.float32) for size in ((6, 10), (6, 10), (10, 6))))
    for tokens in (0, 1, 90):
        same(weights, torch.randn(tokens, 10), torch.tensor([[1, 0]]).expand(tokens, 2), EXACT)


def test_only_experts_that_are_held_and_asked_for_are_read() -> None:
    sizes = ((6, 10), (6, 10), (10, 6))
    parts = [(None, floats(1, *size, torch.float32)[0], None) for size in sizes]
    hidden, weights = torch.randn(3, 10), ExpertWeights(*parts)
    same(weights, hidden, torch.ones(3, 1, dtype=torch.int64), EXACT)
    ids = torch.tensor([[1, 2], [0, 1], [1, 1]], device=DEVICE)
    lost = TRITON.experts(moved(weights), hidden.to(DEVICE), ids).isnan().cpu()
    assert lost.all(-1).equal(ids.cpu() != 1) and lost.any(-1).equal(ids.cpu() != 1)


@given(
    st.integers(1, 30), st.integers(1, 3), st.integers(1, 9), st.sampled_from(((6, 10), (70, 33))), st.data()
)
@settings(max_examples=10)
def test_a_page_table_says_which_experts_are_there(
    tokens: int, top_k: int, experts: int, size: tuple[int, int], data: st.DataObject
) -> None:
    """Rows of the others stay as they are, for whoever computes them. The table changes in its place."""
    ids = torch.tensor([data.draw(st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k))
                        for _ in range(tokens)])  # fmt: skip
    width, hidden = size
    shapes = (size, size, (hidden, width))
    every = moved(ExpertWeights(*(floats(experts, *shape, torch.float32) for shape in shapes)))
    plain = every.with_parts(
        [tuple(None if one is None else one.cpu() for one in part) for part in every.parts]
    )
    rows = torch.randn(tokens, hidden)
    wanted = experts_plain(plain, rows, ids)
    table = torch.zeros(3, experts, dtype=torch.int64, device=DEVICE)
    pages = every.table_over(table)
    for there in data.draw(st.lists(st.sets(st.integers(0, experts - 1)), min_size=1, max_size=3)):
        weights = replace(every.select(there), page_table=pages)
        table.copy_(torch.tensor(weights.addresses))
        out = torch.full((tokens, top_k, hidden), 7.0, device=DEVICE)
        found = TRITON.experts(weights, rows.to(DEVICE), ids.to(DEVICE), out)
        assert found.data_ptr() == out.data_ptr()
        here = torch.isin(ids, torch.tensor(sorted(there), dtype=torch.int64))[:, :, None]
        close(out, torch.where(here, wanted, torch.tensor(7.0)))


def test_pairs_are_grouped_by_expert_in_their_order() -> None:
    ids = torch.tensor([2, 0, 2, 5, 0, 2, 2, 2] * 5, device=DEVICE)
    order, tiles, rows = module.group_pairs(ids, 7)
    assert torch.equal(order.cpu().long(), ids.cpu().argsort(stable=True))
    used = [tuple(tile) for tile in tiles.tolist() if tile[1] < tile[2]]
    assert used == [(0, 0, 10), (2, 10, 26), (2, 26, 35), (5, 35, 40)] and rows == 16


# ---- quantised


def matrix(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Random codes, without NaN, and scales."""
    generator, one = np.random.default_rng(rows + columns), QUANTIZATIONS[kind]
    finite = np.flatnonzero(np.isfinite(TABLES[one.values])).astype(np.uint8)
    codes = generator.choice(finite, (rows, columns))
    groups = -(-columns // one.group)
    scales, offsets = (generator.standard_normal((rows, groups), np.float32) / 50 for _ in range(2))
    return torch.from_numpy(pack(kind, codes, scales, offsets if one.offset else None))


def quantised(inner: str, down: str, size: tuple[int, int]) -> tuple[ExpertWeights, ExpertWeights]:
    """Three experts, and the same as numbers."""
    width, hidden = size
    shapes = ((inner, width, hidden), (inner, width, hidden), (down, hidden, width))
    stored = [tuple(matrix(kind, rows, columns) for _ in range(3)) for kind, rows, columns in shapes]
    numbers = [
        tuple(QuantizedMatrix(one, columns, kind).floats() for one in part)
        for part, (kind, _, columns) in zip(stored, shapes, strict=True)
    ]
    return ExpertWeights(*stored, packed_dtype=join_dtypes(inner, down)), ExpertWeights(*numbers)


@pytest.mark.parametrize(
    ("inner", "down", "size"),
    [
        *((kind, kind, (40, 70)) for kind in QUANTIZATIONS),
        ("int4_offset", "int8_16", (64, 96)),
        ("int4", "fp8", (3, 1100)),
        ("int8_offset", "mxfp4", (1100, 3)),
    ],
)
def test_quantised(inner: str, down: str, size: tuple[int, int]) -> None:
    packed, numbers = quantised(inner, down, size)
    hidden, ids = torch.randn(5, size[1]), torch.tensor([[0, 2], [2, 1], [2, 0], [0, 1], [2, 1]])
    moved_there = ExpertWeights(*moved(packed).parts, packed_dtype=packed.packed_dtype)
    found = TRITON.experts(moved_there, hidden.to(DEVICE), ids.to(DEVICE))
    close(found, experts_plain(numbers, hidden, ids))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_quantised_matrices(kind: str) -> None:
    for columns in (20, 1100):
        stored = matrix(kind, 9, columns)
        here, there = (QuantizedMatrix(one, columns, kind) for one in (stored, stored.to(DEVICE)))
        rows, bias = torch.randn(3, columns), torch.randn(9)
        close(TRITON.linear(rows.to(DEVICE), there), REFERENCE.linear(rows, here))
        close(TRITON.linear(rows.to(DEVICE), there, bias.to(DEVICE)), REFERENCE.linear(rows, here, bias))
        chosen = torch.tensor([8, 0, 8, 3])
        assert torch.equal(TRITON.embed(there, chosen.to(DEVICE)).cpu(), REFERENCE.embed(here, chosen))


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_gated_mlp(kind: str) -> None:
    shapes = ((24, 40), (24, 40), (40, 24))
    if kind == "int4":
        weights = [QuantizedMatrix(matrix(kind, *shape), shape[1], kind) for shape in shapes]
        there = [QuantizedMatrix(one.stored_rows.to(DEVICE), one.columns, kind) for one in weights]
    else:
        weights = [torch.randn(*shape).bfloat16() for shape in shapes]
        there = [one.to(DEVICE) for one in weights]
    rows = torch.randn(3, 40)
    tolerance = EXACT if kind == "int4" else 2 * ROUNDED
    close(TRITON.gated_mlp(rows.to(DEVICE), *there), REFERENCE.gated_mlp(rows, *weights), tolerance)
