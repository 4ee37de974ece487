"""Norms, rotary embedding, the merge and elementwise products: one program a row, one launch an operation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch

WIDE = 4096
"""Maximum numbers of a block of the elementwise kernels."""


@triton.jit
def _norm(rows, added, weight, total, out, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(rows + at + columns, mask=inside, other=0.0)
    if ADDS:
        numbers += tl.load(added + at + columns, mask=inside, other=0.0)
        tl.store(total + at + columns, numbers, mask=inside)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
    scaled = numbers * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + at + columns, scaled, mask=inside)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `reference.dense.rms_norm`."""
    rows = rows.contiguous()
    out, width = torch.empty_like(rows), rows.shape[-1]
    grid = (rows.numel() // max(1, width),)
    launch(_norm, grid, rows, rows, weight, rows, out, width, epsilon, ADDS=False, BLOCK=block(width))
    return out


def add_norm(
    rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.dense.add_norm`, in one pass."""
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
    turned,
    epsilon,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    read, write = rows + row * line + which * head, out + (row * heads + which) * width
    columns = tl.arange(0, BLOCK)
    scale = 1.0
    if NORM:
        whole = tl.load(read + columns, mask=columns < width, other=0.0)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / width + epsilon)
    rest = (columns >= turned) & (columns < width)
    numbers = tl.load(read + columns, mask=rest, other=0.0)
    if NORM:
        numbers = numbers * scale * tl.load(weight + columns, mask=rest, other=0.0)
    tl.store(write + columns, numbers, mask=rest)

    pair = tl.arange(0, HALF)
    half = turned // 2
    inside = pair < half
    one, other = pair, pair + half
    if INTERLEAVED:
        one, other = 2 * pair, 2 * pair + 1
    first = tl.load(read + one, mask=inside, other=0.0)
    second = tl.load(read + other, mask=inside, other=0.0)
    if NORM:
        first = first * scale * tl.load(weight + one, mask=inside, other=0.0)
        second = second * scale * tl.load(weight + other, mask=inside, other=0.0)
    angle = tl.load(positions + row) * half + pair
    cos = tl.load(cosine + angle, mask=inside, other=0.0)
    sin = tl.load(sine + angle, mask=inside, other=0.0)
    tl.store(write + one, first * cos - second * sin, mask=inside)
    tl.store(write + other, second * cos + first * sin, mask=inside)


def rope(
    rows: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    is_interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """As `reference.dense.rope`, with the norm of heads in the same launch."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads, width)
    turned = 2 * cosine.shape[1]
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
        turned,
        epsilon,
        INTERLEAVED=is_interleaved,
        NORM=norm is not None,
        HALF=block(turned // 2),
        BLOCK=block(width),
    )
    return out


@triton.jit
def _merge(
    residual, dense, rows, weights, out, width, K: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.load(residual + row * width + columns, mask=inside, other=0.0)
    if DENSE:
        total += tl.load(dense + row * width + columns, mask=inside, other=0.0)
    for slot in range(K):
        numbers = tl.load(rows + (row * K + slot) * width + columns, mask=inside, other=0.0)
        total += tl.load(weights + row * K + slot) * numbers
    tl.store(out + row * width + columns, total, mask=inside)


def merge(
    residual: torch.Tensor,
    dense: torch.Tensor | None,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """As `reference.gate.merge`: the weighted combine in top-k order, in one launch."""
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
def _silu_times(gate, up, out, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    one = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    product = one * tl.sigmoid(one) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, product, mask=inside)


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [n, w] of one type. Returns float32 [n, w]."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    size = min(1024, block(max(1, gate.numel())))
    launch(_silu_times, (triton.cdiv(gate.numel(), size),), gate, up, out, gate.numel(), BLOCK=size)
    return out


@triton.jit
def _gated_norm(rows, weight, gate, out, line, heads, width, epsilon, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, columns = (row * heads + head) * width, tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(rows + at + columns, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + epsilon)
    factor = tl.load(gate + row * line + head * width + columns, mask=inside, other=0.0)
    scaled = numbers * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + at + columns, scaled * (factor * tl.sigmoid(factor)), mask=inside)


def gated_norm(rows: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `reference.delta.gated_norm`, in one launch."""
    rows, gate = rows.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads * width)
    arguments = (rows, weight, gate, out, gate.stride(0), heads, width, epsilon)
    launch(_gated_norm, (count, heads), *arguments, BLOCK=block(width))
    return out


@triton.jit
def _sigmoid_times(rows, gate, out, line, head, heads, width, BLOCK: tl.constexpr):
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at, columns = (row * heads + which) * width, tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(gate + row * line + which * head + columns, mask=inside, other=0.0)
    tl.store(out + at + columns, tl.load(rows + at + columns, mask=inside) * tl.sigmoid(factor), mask=inside)


def sigmoid_times(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `reference.delta.sigmoid_times`, in one launch."""
    rows, gate = rows.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    count, heads, width = rows.shape
    out = rows.new_empty(count, heads * width)
    lines = gate.stride(0), gate.stride(1)
    launch(_sigmoid_times, (count, heads), rows, gate, out, *lines, heads, width, BLOCK=block(width))
    return out
