"""Memory of this process in huge pages, where the system has them, and copies of weights in it.

A mapped file is read through pages of 4 KiB, from wherever a tensor begins in it. The same kernels read large
pages and aligned rows faster, with fewer faults; docs/measurements.md has by how much.
"""

from __future__ import annotations

import mmap

import torch

CHUNK = 64 << 20
"""Bytes that are mapped at a time: pages that nothing is written to cost no memory."""
ALIGNMENT = 64
"""Of a copy's first byte: a cache line, and the widest vector."""


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
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._free):
            self._free = huge_pages(max(size, CHUNK))
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def huge_pages(size: int) -> torch.Tensor:
    """[size] bytes, zeros that the machine gives when they are first written.

    Raises OSError or OverflowError for more than it can map.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    return torch.frombuffer(memory, dtype=torch.uint8)
