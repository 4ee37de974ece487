"""The product of two tiles, as every kernel here makes it."""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.gpu.triton.launching import IS_INTERPRETED

_USES_FLOAT32 = tl.constexpr(IS_INTERPRETED)
"""Triton's interpreter multiplies the bits of bf16 numbers as integers. So it gets them in float32."""


@triton.jit
def product(rows, weights, total):
    """total + rows [m, k] times weights [n, k] transposed, [m, n] float32.

    Rows take the type of the weights. Float32 is multiplied without TensorFloat-32.
    """
    rows = rows.to(weights.dtype)
    if _USES_FLOAT32:
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    return tl.dot(rows, weights.trans(), total, input_precision="ieee")
