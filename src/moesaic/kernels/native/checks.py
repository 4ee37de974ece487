"""Checks of tensors before their addresses are passed on: dtype, shape, density."""

from __future__ import annotations

import torch

from moesaic.core.weight_types import NATIVE_DTYPES
from moesaic.kernels.matrix import QuantizedMatrix, Weight

NARROW, WIDE = NATIVE_DTYPES.index("bfloat16"), NATIVE_DTYPES.index("float32")
STORED = frozenset({torch.float32, torch.bfloat16})
"""Dtypes that weights may be stored in. Sums are float32."""
CACHED = STORED | {torch.int8}
"""Dtypes that a KV cache may be stored in."""


def shape(tensor: Weight, *expected_shape: int) -> None:
    """Raises ValueError for another shape."""
    if tensor.shape != expected_shape:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not fit: allowed is {expected_shape}")


def axes(tensor: Weight, count: int) -> torch.Size:
    """The shape. Raises ValueError for another number of axes, or if the last one has no numbers."""
    if len(tensor.shape) != count or tensor.shape[-1] < 1:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not fit: allowed are {count} axes")
    return tensor.shape


def is_float(tensor: torch.Tensor) -> None:
    """Raises TypeError unless it is float32."""
    if tensor.dtype is not torch.float32:
        raise TypeError(f"rows: got {tensor.dtype}; allowed: float32")


def rows(tensor: torch.Tensor, *expected_shape: int) -> torch.Tensor:
    """A dense float32 tensor of a shape (any, if none is given). It is copied if it is not dense."""
    is_float(tensor)
    if expected_shape:
        shape(tensor, *expected_shape)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def rows_with_stride(tensor: torch.Tensor, n: int, width: int) -> torch.Tensor:
    """A float32 tensor [n, width] with dense rows, which may be apart."""
    is_float(tensor)
    shape(tensor, n, width)
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def heads(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor [n, H, d] with dense heads; rows and heads may be apart."""
    is_float(tensor)
    axes(tensor, 3)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def exact(tensor: torch.Tensor | None, *expected_shape: int, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor that must be dense and of this type and shape; 0 for None."""
    if tensor is None:  # the compiled module reads address 0 as "there is none"
        return 0
    shape(tensor, *expected_shape)
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise TypeError(f"got {tensor.dtype} with strides {tensor.stride()}; allowed: dense {dtype}")
    return tensor.data_ptr()


def wide(tensor: torch.Tensor, *expected_shape: int) -> bool:
    """True if `tensor` is float32, False if bf16. Raises TypeError for another dtype or a tensor that is
    not dense."""
    if expected_shape:
        shape(tensor, *expected_shape)
    if tensor.dtype not in STORED:
        raise TypeError(f"weights: got {tensor.dtype}; allowed: float32, bfloat16")
    if not tensor.is_contiguous():
        raise TypeError("a weight is not dense")
    return tensor.dtype is torch.float32


def weight(matrix: Weight, *expected_shape: int) -> tuple[int, int]:
    """The address of a dense matrix, and how the compiled module is told its type. Raises as `wide` does."""
    if not isinstance(matrix, QuantizedMatrix):
        return matrix.data_ptr(), WIDE if wide(matrix, *expected_shape) else NARROW
    if expected_shape:
        shape(matrix, *expected_shape)
    if not matrix.stored_rows.is_contiguous():
        raise TypeError("a weight is not dense")
    return matrix.stored_rows.data_ptr(), NATIVE_DTYPES.index(matrix.kind)


def cache(tensor: torch.Tensor, *expected_shape: int) -> int:
    """Bytes of a number in a KV cache of this shape (any, if none is given). Raises as `wide` does."""
    if expected_shape:
        shape(tensor, *expected_shape)
    if tensor.dtype not in CACHED:
        raise TypeError(f"a KV cache: got {tensor.dtype}; allowed: float32, bfloat16, int8")
    if not tensor.is_contiguous():
        raise TypeError("a KV cache is not dense")
    return tensor.dtype.itemsize
