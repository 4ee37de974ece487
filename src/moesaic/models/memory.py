"""Copies of weights in memory of this process."""

from __future__ import annotations

import torch

from moesaic.models.pages import aligned, huge_pages

CHUNK = 64 << 20
"""Bytes that are mapped at a time: pages that nothing is written to cost no memory."""


class Copies:
    """Copies of tensors, one behind the other. Their memory lives as long as any of them.

    >>> copies = Copies()
    >>> one, other = copies.of(torch.ones(3)), copies.of(torch.zeros(5))
    >>> one.tolist(), other.data_ptr() - one.data_ptr()
    ([1.0, 1.0, 1.0], 64)
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in the same shape, dense."""
        size = aligned(tensor.nbytes)
        if size > len(self._free):
            self._free = torch.frombuffer(huge_pages(max(size, CHUNK)), dtype=torch.uint8)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
