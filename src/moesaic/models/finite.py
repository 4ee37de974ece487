"""Looks for NaN and infinite numbers in weights.

An exponent whose bits are all set means that a number is NaN or infinite. So the bits without the sign are
compared as integers, which takes one pass and no conversion.
"""

from __future__ import annotations

import numpy as np
import torch

CHUNK = 1 << 18
"""Numbers that are looked at together, so that they stay in the cache of the CPU."""
_INFINITY = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""Data type -> integers of its width, and the bits of infinity."""


def first_not_finite(tensor: torch.Tensor) -> int | None:
    """Returns the index in row-major order of the first NaN or infinite number, or None.

    >>> first_not_finite(torch.tensor([[0.0, 1.0], [float("nan"), -float("inf")]]))
    2
    """
    if tensor.device.type != "cpu":
        if torch.isfinite(tensor.sum(dtype=torch.float32)):
            return None
        broken = torch.nonzero(~torch.isfinite(tensor).view(-1))[:1].tolist()
        return int(broken[0][0]) if broken else None
    kind, infinity = _INFINITY[tensor.dtype]
    bits = tensor.contiguous().view(-1).view(kind).numpy()
    memory = np.empty(min(CHUNK, len(bits)), bits.dtype)
    for begin in range(0, len(bits), CHUNK):
        part = bits[begin : begin + CHUNK]
        without_sign = np.bitwise_and(part, np.iinfo(bits.dtype).max, out=memory[: len(part)])
        if without_sign.max() >= infinity:
            return begin + int(np.argmax(without_sign >= infinity))
    return None
