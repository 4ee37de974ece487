"""Writes of keys and values to a paged cache, rounded to its type in the same launch.

Rows whose slot is negative are not written: they pad a recorded step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moesaic.gpu.triton.launching import block, launch
from moesaic.kernels.cache import LEAST_PEAK, LEVELS, SCALE_BYTES


@triton.jit
def _store(rows, cache, slots, line, head, heads, width, BLOCK: tl.constexpr):
    row, head_id = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns, slot = tl.arange(0, BLOCK), tl.load(slots + row)
    mask = columns < width
    numbers = tl.load(rows + row * line + head_id * head + columns, mask=mask, other=0.0)
    offset = (slot * heads + head_id) * width
    if slot >= 0:
        tl.store(cache + offset + columns, numbers.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _round_half_even(numbers):
    """The nearest integers of numbers below 2**22, ties to even. At 3 * 2**22 a float32 has no fractions."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def _store_int8(
    rows,
    cache,
    slots,
    line,
    head,
    heads,
    width,
    least,
    LEVELS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head_id = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    numbers = tl.load(rows + row * line + head_id * head + columns, mask=mask, other=0.0)
    finite = tl.abs(numbers) < float("inf")  # not for NaN
    peak = tl.max(tl.where(finite, tl.abs(numbers), 0.0), 0)
    scale = tl.where(peak < least, 0.0, tl.div_rn(peak, LEVELS * 1.0))
    quotients = tl.div_rn(numbers, tl.where(scale > 0, scale, 1.0))
    codes = tl.where(scale > 0, tl.where(finite, _round_half_even(quotients), 0.0), 0.0)
    num_nonfinite = tl.sum(tl.where(finite, 0, 1), 0)  # numbers beyond the row are 0, which is finite
    scale = tl.where(num_nonfinite > 0, float("nan"), scale)
    slot, bits = tl.load(slots + row), scale.to(tl.int32, bitcast=True)
    offset = (slot * heads + head_id) * (width + SCALE)
    if slot >= 0:
        tl.store(cache + offset + columns, codes.to(tl.int8), mask=mask)
        for byte in tl.static_range(SCALE):
            tl.store(cache + offset + width + byte, ((bits >> (8 * byte)) & 255).to(tl.int8))


def store(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Computes what `reference.dense.store` computes."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, heads, width = rows.shape
    lines = (rows.stride(0), rows.stride(1), heads, width)
    if cache.dtype is torch.int8:
        constants = {"LEVELS": LEVELS, "SCALE": SCALE_BYTES, "BLOCK": block(width)}
        launch(_store_int8, (count, heads), rows, cache, slots, *lines, LEAST_PEAK, **constants)
    else:
        launch(_store, (count, heads), rows, cache, slots, *lines, BLOCK=block(width))
