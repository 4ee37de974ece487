"""Products with quantised matrices, dequantised in registers. Float matrices are torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.gpu.triton.product import product
from moesaic.gpu.triton.rows import silu_times
from moesaic.gpu.triton.weights import step_of, weight_tile
from moesaic.kernels.matrix import QuantizedMatrix, Weight
from moesaic.kernels.reference import dense

TILE_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile of few rows, and of MANY_ROWS rows or more."""
TILE_COLUMNS = 64
"""Columns of a tile."""


@triton.jit
def _linear(
    rows,
    weight,
    bias,
    out,
    count,
    columns,
    size,
    line,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(0, size, STEP):
        inner = step + tl.arange(0, STEP)
        mask = (lines < count)[:, None] & (inner < size)[None, :]
        part = tl.load(rows + lines[:, None].to(tl.int64) * size + inner[None, :], mask=mask, other=0.0)
        total = product(part, weight_tile(weight, column, columns, step, size, line, KIND, STEP), total)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    pointers = out + lines[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(pointers, total, mask=(lines < count)[:, None] & (column < columns)[None, :])


@triton.jit
def _numbers(weight, row_ids, out, count, size, line, KIND: tl.constexpr, STEP: tl.constexpr):
    lines = tl.load(row_ids + tl.program_id(0) + tl.arange(0, 1))
    step = tl.program_id(1) * STEP
    numbers = weight_tile(weight, lines, count, step, size, line, KIND, STEP)
    inner = step + tl.arange(0, STEP)
    pointers = out + tl.program_id(0).to(tl.int64) * size + inner[None, :]
    tl.store(pointers, numbers, mask=(inner < size)[None, :])


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes what `reference.dense.linear` computes."""
    if not isinstance(weight, QuantizedMatrix):
        return dense.linear(rows, weight, bias)
    rows = rows.contiguous()
    columns, size = weight.shape
    out = rows.new_empty(len(rows), columns)
    tile = MANY_ROWS if len(rows) >= MANY_ROWS else TILE_ROWS
    launch(
        _linear,
        (triton.cdiv(len(rows), tile), triton.cdiv(columns, TILE_COLUMNS)),
        rows,
        weight.stored_rows,
        rows if bias is None else bias,
        out,
        len(rows),
        columns,
        size,
        weight.stored_rows.stride(0),
        KIND=weight.kind,
        HAS_BIAS=bias is not None,
        ROWS=tile,
        COLUMNS=TILE_COLUMNS,
        STEP=step_of(weight.kind),
    )
    return out


def linears(
    rows: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Computes what `reference.dense.linears` computes."""
    return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def gated_mlp(rows: torch.Tensor, gate_proj: Weight, up_proj: Weight, down_proj: Weight) -> torch.Tensor:
    """Computes what `reference.dense.gated_mlp` computes."""
    return linear(silu_times(linear(rows, gate_proj), linear(rows, up_proj)), down_proj)


def sigmoid_gate(rows: torch.Tensor, weight: Weight, values: torch.Tensor) -> torch.Tensor:
    """Computes what `reference.dense.sigmoid_gate` computes."""
    return values * torch.sigmoid(linear(rows, weight))


def embed(table: Weight, token_ids: torch.Tensor) -> torch.Tensor:
    """Computes what `reference.dense.embed` computes."""
    if not isinstance(table, QuantizedMatrix):
        return dense.embed(table, token_ids)
    count, size = table.shape
    out = torch.empty(len(token_ids), size, device=table.device)
    step = min(1024, block(size, least=16))
    grid = len(token_ids), triton.cdiv(size, step)
    lines = count, size, table.stored_rows.stride(0)
    launch(_numbers, grid, table.stored_rows, token_ids, out, *lines, KIND=table.kind, STEP=step)
    return out
