"""Memory of this process in huge pages, where the system has them.

A mapped file is read through pages of 4 KiB, from wherever a tensor begins in it. The same kernels read large
pages and aligned rows faster, with fewer faults; docs/measurements.md has by how much.
"""

from __future__ import annotations

import mmap

ALIGNMENT = 64
"""Of a copy's first byte: a cache line, and the widest vector."""


def huge_pages(size: int) -> mmap.mmap:
    """[size] bytes, zeros that the machine gives when they are first written.

    Raises OSError or OverflowError for more than it can map.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages
    return memory


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT. Example: 65 -> 128."""
    return -(-size // ALIGNMENT) * ALIGNMENT
