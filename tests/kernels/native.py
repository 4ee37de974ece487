"""What the tests of the native kernels share: weights as a mapped file has them, and how near is near."""

from __future__ import annotations

import math

import torch

ROWS = (0, 1, 2, 3, 5, 7, 8, 13, 49, 130)
WIDTHS = (1, 7, 24, 33, 100, 1030, 2100)
"""Of rows: no multiples of a vector, and longer than the block that sums are cut at."""
STORED = (torch.float32, torch.bfloat16)


def stored(*shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Random numbers between an odd element of a larger buffer and its end, as in a memory-mapped file."""
    buffer = torch.randn(math.prod(shape) + 1).mul_(spread).to(dtype)
    return buffer[1:].view(shape)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` of the largest number."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit: NaN is NaN, and 0 is not -0."""
    integer = torch.int32 if wanted.dtype.itemsize == 4 else torch.int16
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(integer), wanted.contiguous().view(integer)
    )
