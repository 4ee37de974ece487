"""Converts rows to and from their form in a KV cache. See `kernels.cache` for the layout."""

from __future__ import annotations

import torch

from moesaic.kernels.cache import LEAST_PEAK, LEVELS, SCALE_BYTES


def encode(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts rows [..., d] float32 to `dtype`. Returns [..., stored width].

    In int8 each number is rounded to the nearest multiple of its row's scale, ties to even. A row with an
    infinity or a NaN gets the scale NaN, so all its numbers become NaN.
    """
    if dtype is not torch.int8:
        return rows.to(dtype)
    peak = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(peak < LEAST_PEAK, 0.0, peak / LEVELS)
    scale.masked_fill_(~peak.isfinite(), torch.nan)
    # A NaN scale fails the comparison too. Its row gets zeros, and the scale alone makes it NaN.
    integers = torch.where(scale > 0, rows / scale, 0.0).round()
    return torch.cat((integers.to(torch.int8), scale.view(torch.int8)), dim=-1)


def decode(stored_rows: torch.Tensor) -> torch.Tensor:
    """Converts stored rows [..., stored width] to [..., d] float32."""
    if stored_rows.dtype is not torch.int8:
        return stored_rows.float()
    integers, scale = stored_rows.tensor_split([-SCALE_BYTES], dim=-1)
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return integers.float().mul_(scale)
