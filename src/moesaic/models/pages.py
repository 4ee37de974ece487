"""Memory of this process in huge pages, where the system supports them.

A mapped file is read through the pages in which it was cached. They are 2 MiB large if the file system
supports such pages and was asked for them before it read the file, and smaller otherwise. The same kernels
read large pages faster, with fewer page faults; docs/lab/2026-11-24-two-step-fetch.md has measurements.
"""

from __future__ import annotations

import ctypes
import mmap

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
"""Alignment of a copy's first byte: a cache line, and the widest vector."""
_C_LIBRARY = ctypes.CDLL(None)


def huge_pages(size: int) -> mmap.mmap:
    """Maps [size] bytes of zeros. The system provides the pages when they are first written.

    Raises OSError or OverflowError if the system cannot map that much.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # the kernel does not support huge pages
    return memory


def align_size(size: int) -> int:
    """The next multiple of ALIGNMENT. Example: 65 -> 128."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def prefer_huge(address: int, size: int) -> None:
    """Asks the file system to cache the rest of a mapped file in huge pages, if it supports them."""
    _advise(address, size, "MADV_HUGEPAGE")


def drop_pages(address: int, size: int) -> None:
    """Drops the whole pages of a mapped file in this range. The next access reads them again."""
    begin = -(-address // PAGE) * PAGE
    _advise(begin, max(0, (address + size) // PAGE * PAGE - begin), "MADV_DONTNEED")


def _advise(address: int, size: int, advice: str) -> None:
    """Calls madvise, and ignores errors. Does nothing if the system does not know this advice."""
    # Python's mmap only advises on its own mappings, and those of safetensors belong to the library.
    madvise, number = getattr(_C_LIBRARY, "madvise", None), getattr(mmap, advice, None)
    begin = address // PAGE * PAGE
    if madvise is not None and number is not None and size > 0:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), number)
