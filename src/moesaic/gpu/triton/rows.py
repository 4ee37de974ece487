"""Norms, rotary embedding, the merge and elementwise products: one program a row, one launch an operation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch

WIDE = 4096
"""Maximum numbers of a block of the elementwise kernels."""


@triton.jit
def _norm(rows, addend, weight, total, out, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row_offset = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    numbers = tl.load(rows + row_offset + columns, mask=mask, other=0.0)
    if ADDS:
        numbers += tl.load(addend + row_offset + columns, mask=mask, other=0.0)
        tl.store(total + row_offset + columns, numbers, mask=mask)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
    normalized_numbers = numbers * scale * tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row_offset + columns, normalized_numbers, mask=mask)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Computes what `reference.dense.rms_norm` computes."""
    rows = rows.contiguous()
    out, width = torch.empty_like(rows), rows.shape[-1]
    grid = (rows.numel() // max(1, width),)
    launch(_norm, grid, rows, rows, weight, rows, out, width, epsilon, ADDS=False, BLOCK=block(width))
    return out


def add_norm(
    rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `reference.dense.add_norm` computes, in one pass."""
    rows, addend = rows.contiguous(), addend.contiguous()
    total, out = torch.empty_like(rows), torch.empty_like(rows)
    count, width = rows.shape
    arguments = (rows, addend, weight, total, out, width, epsilon)
    launch(_norm, (count,), *arguments, ADDS=True, BLOCK=block(width))
    return total, out


@triton.jit
def _rope(
    rows,
    cosine,
    sine,
    positions,
    weight,
    out,
    line,
    head,
    heads,
    width,
    rotary_dim,
    epsilon,
    IS_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head_id = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    read, write = rows + row * line + head_id * head, out + (row * heads + head_id) * width
    columns = tl.arange(0, BLOCK)
    scale = 1.0
    if NORM:
        head_numbers = tl.load(read + columns, mask=columns < width, other=0.0)
        scale = tl.rsqrt(tl.sum(head_numbers * head_numbers, 0) / width + epsilon)
    pass_through = (columns >= rotary_dim) & (columns < width)
    numbers = tl.load(read + columns, mask=pass_through, other=0.0)
    if NORM:
        numbers = numbers * scale * tl.load(weight + columns, mask=pass_through, other=0.0)
    tl.store(write + columns, numbers, mask=pass_through)

    pair = tl.arange(0, HALF)
    half = rotary_dim // 2
    mask = pair < half
    first_columns, second_columns = pair, pair + half
    if IS_INTERLEAVED:
        first_columns, second_columns = 2 * pair, 2 * pair + 1
    first = tl.load(read + first_columns, mask=mask, other=0.0)
    second = tl.load(read + second_columns, mask=mask, other=0.0)
    if NORM:
        first = first * scale * tl.load(weight + first_columns, mask=mask, other=0.0)
        second = second * scale * tl.load(weight + second_columns, mask=mask, other=0.0)
    angle = tl.load(positions + row) * half + pair
    cos = tl.load(cosine + angle, mask=mask, other=0.0)
    sin = tl.load(sine + angle, mask=mask, other=0.0)
    tl.store(write + first_columns, first * cos - second * sin, mask=mask)
    tl.store(write + second_columns, second * cos + first * sin, mask=mask)


def rope(
    rows: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    is_interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Computes what `reference.dense.rope` computes, with the norm of heads in the same launch."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads, width)
    rotary_dim = 2 * cosine.shape[1]
    launch(
        _rope,
        (count, heads),
        rows,
        cosine.contiguous(),
        sine.contiguous(),
        positions,
        rows if norm is None else norm,
        out,
        rows.stride(0),
        rows.stride(1),
        heads,
        width,
        rotary_dim,
        epsilon,
        IS_INTERLEAVED=is_interleaved,
        NORM=norm is not None,
        HALF=block(rotary_dim // 2),
        BLOCK=block(width),
    )
    return out


@triton.jit
def _merge(
    residual, dense, rows, weights, out, width, K: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.load(residual + row * width + columns, mask=mask, other=0.0)
    if DENSE:
        total += tl.load(dense + row * width + columns, mask=mask, other=0.0)
    for slot in range(K):
        numbers = tl.load(rows + (row * K + slot) * width + columns, mask=mask, other=0.0)
        total += tl.load(weights + row * K + slot) * numbers
    tl.store(out + row * width + columns, total, mask=mask)


def merge(
    residual: torch.Tensor,
    dense: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Computes what `reference.gate.merge` computes: the weighted combine in top-k order, in one launch."""
    if rows is None or weights is None:
        return residual if dense is None else residual + dense
    residual, rows = residual.contiguous(), rows.contiguous()
    out = torch.empty_like(residual)
    count, width = residual.shape
    size = min(WIDE, block(width))
    arguments = residual, residual if dense is None else dense.contiguous(), rows, weights.contiguous(), out
    constants = {"K": rows.shape[1], "DENSE": dense is not None, "BLOCK": size}
    launch(_merge, (count, triton.cdiv(width, size)), *arguments, width, **constants)
    return out


@triton.jit
def _silu_times(gate_rows, up_rows, out, numbers, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numbers
    gate_numbers = tl.load(gate_rows + offsets, mask=mask, other=0.0).to(tl.float32)
    product = (
        gate_numbers
        * tl.sigmoid(gate_numbers)
        * tl.load(up_rows + offsets, mask=mask, other=0.0).to(tl.float32)
    )
    tl.store(out + offsets, product, mask=mask)


def silu_times(gate_rows: torch.Tensor, up_rows: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [n, w] of one type. Returns float32 [n, w]."""
    gate_rows, up_rows = gate_rows.contiguous(), up_rows.contiguous()
    out = torch.empty(gate_rows.shape, dtype=torch.float32, device=gate_rows.device)
    size = min(1024, block(max(1, gate_rows.numel())))
    launch(
        _silu_times,
        (triton.cdiv(gate_rows.numel(), size),),
        gate_rows,
        up_rows,
        out,
        gate_rows.numel(),
        BLOCK=size,
    )
    return out


@triton.jit
def _gated_norm(rows, weight, gate, out, line, heads, width, epsilon, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_offset, columns = (row * heads + head) * width, tl.arange(0, BLOCK)
    mask = columns < width
    numbers = tl.load(rows + row_offset + columns, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
    factor = tl.load(gate + row * line + head * width + columns, mask=mask, other=0.0)
    normalized_numbers = numbers * scale * tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row_offset + columns, normalized_numbers * (factor * tl.sigmoid(factor)), mask=mask)


def gated_norm(rows: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Computes what `reference.delta.gated_norm` computes, in one launch."""
    rows, gate = rows.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads * width)
    arguments = (rows, weight, gate, out, gate.stride(0), heads, width, epsilon)
    launch(_gated_norm, (count, heads), *arguments, BLOCK=block(width))
    return out


@triton.jit
def _sigmoid_times(rows, gate, out, line, head, heads, width, BLOCK: tl.constexpr):
    row, head_id = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_offset, columns = (row * heads + head_id) * width, tl.arange(0, BLOCK)
    mask = columns < width
    factor = tl.load(gate + row * line + head_id * head + columns, mask=mask, other=0.0)
    tl.store(
        out + row_offset + columns,
        tl.load(rows + row_offset + columns, mask=mask) * tl.sigmoid(factor),
        mask=mask,
    )


def sigmoid_times(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes what `reference.delta.sigmoid_times` computes, in one launch."""
    rows, gate = rows.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads * width)
    lines = gate.stride(0), gate.stride(1)
    launch(_sigmoid_times, (count, heads), rows, gate, out, *lines, heads, width, BLOCK=block(width))
    return out
