"""Reads a file without the page cache: it takes no other memory, and every read comes from the disk.

If the file system supports O_DIRECT, the disk writes directly to the target memory. Otherwise the kernel
copies through its cache, and the cached pages are dropped: at the beginning, and after every read.

A disk reads faster with several reads in flight, so `ParallelReads` makes them from several threads.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from moesaic.models.file_state import OpenFile

ALIGNMENT = 4096
"""Offsets, lengths and addresses must be multiples of this many bytes."""
PIECE = 8 << 20
"""Maximum bytes of one system call."""
IN_FLIGHT = 4
"""Reads of a disk at once. docs/offloading.md has the speed with other numbers."""


class DirectFile:
    """A file that is open until `close` is called or the object is deleted. Several threads may read at once.

    direct: False reads through the page cache even if O_DIRECT is supported. Raises OSError as `open` does.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.path = path
        descriptor = _open_direct(path) if direct else None
        self.direct = descriptor is not None
        """Whether reads bypass the page cache."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
        self._end = weakref.finalize(self, os.close, self._descriptor)
        self._open_file = OpenFile(path, self._descriptor)
        if descriptor is None:  # drop cached pages, and disable read-ahead
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, target: memoryview) -> int:
        """Reads the bytes from `offset` into `target`, without the GIL. Returns how many bytes were read.

        At the end of the file they are fewer, and the rest of `target` stays as it is. Raises ValueError if
        offset, length or address is not a multiple of ALIGNMENT, OSError if the disk fails, and
        CheckpointError if somebody has written to the file since it was opened.
        """
        target = target.cast("B")
        address = np.frombuffer(target, np.uint8).ctypes.data if target else 0
        if offset < 0 or any(number % ALIGNMENT for number in (offset, len(target), address)):
            raise ValueError(
                f"{len(target)} bytes at {offset} to address {address}; allowed: multiples of {ALIGNMENT}"
            )
        got = 0
        while got < len(target):
            piece = target[got : got + PIECE]
            count = self._piece(offset + got, piece)
            got += count
            # A direct read only ends within a block where the file does.
            if not count or (self.direct and count % ALIGNMENT):
                break
        self._open_file.check()
        return got

    def _piece(self, offset: int, target: memoryview) -> int:
        """Reads with one system call, or two if the range contains the file's last block."""
        if not self.direct:
            count = os.preadv(self._descriptor, [target], offset)
            os.posix_fadvise(self._descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)
            return count
        full_blocks = os.lseek(self._descriptor, 0, os.SEEK_END) // ALIGNMENT * ALIGNMENT - offset
        if full_blocks > 0:
            return os.preadv(self._descriptor, [target[:full_blocks]], offset)
        with mmap.mmap(-1, ALIGNMENT) as block:  # a direct read of the last block would write past its end
            count = os.preadv(self._descriptor, [block], offset)
            target[:count] = block[:count]
        return count

    def close(self) -> None:
        """Closes the file; later reads fail. May be called more than once."""
        self._end()
        self._descriptor = -1

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class ParallelReads:
    """Makes several reads at once: the caller's thread and IN_FLIGHT - 1 others, which begin when needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(IN_FLIGHT - 1, "reading weights")

    def run(self, reads: Sequence[Callable[[], int]]) -> int:
        """Makes all reads, in any order. Returns the sum of what they return.

        Raises the error of the first read that failed, once none is running.
        """
        if len(reads) <= 1:
            return sum(read() for read in reads)
        remaining = iter(reads)

        def read_remaining() -> int:
            return sum(read() for read in remaining)  # `next` of an iterator is atomic

        futures = [self._threads.submit(read_remaining) for _ in range(min(IN_FLIGHT, len(reads)) - 1)]
        try:
            total = read_remaining()
        finally:  # after an error the other threads begin no further read
            for _ in remaining:
                pass
            wait(futures)
        return total + sum(future.result() for future in futures)

    def close(self) -> None:
        """Ends the threads. May be called more than once."""
        self._threads.shutdown()


def _open_direct(path: Path) -> int | None:
    """Returns a descriptor for reads that bypass the page cache, or None if the file system has no O_DIRECT.

    Some file systems open the file but refuse the first read, so this tries to read one block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    try:
        with mmap.mmap(-1, ALIGNMENT) as block:
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EINVAL:
            raise
        return None
    return descriptor
