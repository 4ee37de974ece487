"""How a KV cache stores a row: the key or the value of one token and head, or the latent of all heads.

In a float type a row is its numbers. In int8 it is `width` integers followed by the four bytes of a float32
scale: each number is its integer times the scale. ZeroQuant (Yao et al. 2022) has one scale for each
token's activations; here each head has its own. Integers and scales are one tensor, so code that copies
blocks copies both.

Question: What does a row in the KV cache look like?
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LEVELS = 127
"""Integers are -LEVELS to LEVELS: scale = largest magnitude / LEVELS."""
LEAST_PEAK = LEVELS * 2.0**-126
"""A row with a smaller largest magnitude is stored as zeros with scale 0. Other scales are normal numbers."""


def stored_width(width: int, dtype: torch.dtype) -> int:
    """Elements of a stored row of `width` numbers."""
    return width + SCALE_BYTES if dtype is torch.int8 else width


def width_of(rows: torch.Tensor) -> int:
    """Numbers of each row [..., stored width]."""
    return rows.shape[-1] - SCALE_BYTES if rows.dtype is torch.int8 else rows.shape[-1]
