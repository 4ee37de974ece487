"""Memory of this process in huge pages, where the system has them.

A mapped file is read through the pages that it was cached in: of 2 MiB where the file system has such ones
and was asked for them before it read the file, smaller ones else. The same kernels read large pages faster,
with fewer faults; docs/lab/2026-11-24-two-step-fetch.md has by how much.
"""

from __future__ import annotations

import ctypes
import mmap

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
"""Of a copy's first byte: a cache line, and the widest vector."""
_C_LIBRARY = ctypes.CDLL(None)


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


def prefer_huge(address: int, size: int) -> None:
    """Asks that what is not cached yet of a mapped file be so in huge pages, if its file system has them."""
    _advise(address, size, "MADV_HUGEPAGE")


def give_back(address: int, size: int) -> None:
    """The whole pages of a mapped file between; they are read again when somebody looks."""
    begin = -(-address // PAGE) * PAGE
    _advise(begin, max(0, (address + size) // PAGE * PAGE - begin), "MADV_DONTNEED")


def _advise(address: int, size: int, advice: str) -> None:
    """Advice: where the system has none of the kind, or refuses it, all goes on as without."""
    madvise, number = getattr(_C_LIBRARY, "madvise", None), getattr(mmap, advice, None)
    begin = address // PAGE * PAGE
    if madvise is not None and number is not None and size > 0:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), number)
