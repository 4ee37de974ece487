"""The Triton kernels for tests: on a GPU where there is one, otherwise in Triton's interpreter on the CPU.

The interpreter truncates a float32 that becomes bf16, where a GPU rounds. So tolerances of bf16 are two units
of its last place.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moesaic.gpu.triton import operations
from moesaic.gpu.triton.launching import IS_INTERPRETED, Launches
from moesaic.kernels import table

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
TRITON = table.pick(DEVICE, "triton")
EXACT, ROUNDED = 1e-5, 2**-7

__all__ = ["DEVICE", "EXACT", "IS_INTERPRETED", "ROUNDED", "TRITON", "Launches", "close", "operations"]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = EXACT) -> None:
    """Whether two tensors are equal up to `tolerance` times the largest number."""
    found = found.cpu()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
