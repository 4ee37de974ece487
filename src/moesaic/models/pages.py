"""Memory of this process in huge pages, where the system supports them.

A mapped file is read through the pages in which it was cached. They are 2 MiB large if the file system
supports such pages and was asked for them before it read the file, and smaller otherwise. The same kernels
read large pages faster, with fewer page faults; docs/lab/2026-11-24-two-step-fetch.md has measurements.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
HUGE_PAGE = 1 << 21
"""Bytes of a huge page."""
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


class ReservedMemory:
    """[size] bytes of address space, of which the system provides pages when they are first written.

    What is not needed can be given back, and is zero when it is used again. page: bytes of the pages in which
    that is done: PAGE, or HUGE_PAGE for memory in huge pages.

    >>> reserved = ReservedMemory(3 * PAGE, PAGE)
    >>> reserved.array[5] = 7
    >>> reserved.give_back(0, PAGE)
    >>> int(reserved.array[5])
    0

    Raises OSError or OverflowError if the system cannot map that much.
    """

    def __init__(self, size: int, page: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # A page more, so that the first byte can be at a multiple of a page.
        self._mapping = mmap.mmap(-1, size + page, flags=flags)
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE if page > PAGE else mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # the kernel does not support huge pages
        memory = np.frombuffer(self._mapping, np.uint8)
        begin = -memory.ctypes.data % page
        self.array = memory[begin : begin + size]
        """[size] uint8. Its first byte is at a multiple of a page."""
        self.page = page

    def provide(self, begin: int, end: int) -> None:
        """Have the system provide the pages of bytes begin : end, which must not have been written yet."""
        self.array[begin:end:PAGE] = 0

    def give_back(self, begin: int, end: int) -> None:
        """Give back the whole pages of bytes begin : end."""
        first, last = -(-begin // self.page) * self.page, end // self.page * self.page
        drop_pages(self.array.ctypes.data + first, last - first)


def align_size(size: int) -> int:
    """The next multiple of ALIGNMENT. Example: 65 -> 128."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def prefer_huge(address: int, size: int) -> None:
    """Asks the file system to cache the rest of a mapped file in huge pages, if it supports them."""
    _advise(address, size, "MADV_HUGEPAGE")


def drop_pages(address: int, size: int) -> None:
    """Drops the whole pages in this range. The next access reads them again from the file that is mapped
    there, and without a file it finds zeros."""
    begin = -(-address // PAGE) * PAGE
    _advise(begin, max(0, (address + size) // PAGE * PAGE - begin), "MADV_DONTNEED")


def _advise(address: int, size: int, advice: str) -> None:
    """Calls madvise, and ignores errors. Does nothing if the system does not know this advice."""
    # Python's mmap only advises on its own mappings, and those of safetensors belong to the library.
    madvise, number = getattr(_C_LIBRARY, "madvise", None), getattr(mmap, advice, None)
    begin = address // PAGE * PAGE
    if madvise is not None and number is not None and size > 0:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + size - begin), number)
