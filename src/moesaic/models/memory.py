"""Copies of weights in this process's own memory."""

from __future__ import annotations

import torch

from moesaic.models.pages import align_size, huge_pages

CHUNK = 64 << 20
"""Bytes that are mapped at a time. Pages that are not written use no memory."""


class Copies:
    """Copies of tensors, one after the other. Their memory stays allocated while any of them exists.

    >>> copies = Copies()
    >>> one, other = copies.copy(torch.ones(3)), copies.copy(torch.zeros(5))
    >>> one.tolist(), other.data_ptr() - one.data_ptr()
    ([1.0, 1.0, 1.0], 64)
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a dense copy of the same shape."""
        size = align_size(tensor.nbytes)
        if size > len(self._free):
            self._free = torch.frombuffer(huge_pages(max(size, CHUNK)), dtype=torch.uint8)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
