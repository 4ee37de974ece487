"""Reading a file past the page cache: what is read twice comes from the disk twice and takes no other memory.

Where the file system has O_DIRECT, the disk writes straight to where the bytes are wanted. Elsewhere the
kernel copies them through its cache, and what is cached is dropped: at the beginning, and after every piece.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

ALIGNMENT = 4096
"""Of offsets, lengths and addresses, in bytes."""
PIECE = 8 << 20
"""Bytes of one system call at most: enough for any disk to work in parallel."""


class DirectFile:
    """One file, open until `close` or the object's end. Several threads may read at once.

    direct: False reads through the cache even where O_DIRECT is there. Raises OSError like `open`.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.path = path
        found = _open_direct(path) if direct else None
        self.direct = found is not None
        """Whether reads pass the page cache."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if found is None else found
        self._end = weakref.finalize(self, os.close, self._descriptor)
        if found is None:  # what is cached goes, and no reading ahead brings what nobody asked for
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, into: memoryview) -> int:
        """The bytes from `offset` on to `into`, without the interpreter's lock. Returns how many.

        At the end of the file they are fewer, and the rest of `into` stays as it is. ValueError for an
        offset, a length or an address that is no multiple of ALIGNMENT; OSError when the disk fails.
        """
        into = into.cast("B")
        address = np.frombuffer(into, np.uint8).ctypes.data if into else 0
        if offset < 0 or any(number % ALIGNMENT for number in (offset, len(into), address)):
            raise ValueError(
                f"{len(into)} bytes at {offset} to address {address}: no multiples of {ALIGNMENT}"
            )
        got = 0
        while got < len(into):
            piece = into[got : got + PIECE]
            count = self._piece(offset + got, piece)
            got += count
            if not count or (self.direct and count % ALIGNMENT):
                break
        return got

    def _piece(self, offset: int, into: memoryview) -> int:
        """One system call, two in the file's last block."""
        if not self.direct:
            count = os.preadv(self._descriptor, [into], offset)
            os.posix_fadvise(self._descriptor, offset, len(into), os.POSIX_FADV_DONTNEED)
            return count
        whole = os.lseek(self._descriptor, 0, os.SEEK_END) // ALIGNMENT * ALIGNMENT - offset
        if whole > 0:
            return os.preadv(self._descriptor, [into[:whole]], offset)
        with mmap.mmap(-1, ALIGNMENT) as block:  # a direct read of it would write behind its end too
            count = os.preadv(self._descriptor, [block], offset)
            into[:count] = block[:count]
        return count

    def close(self) -> None:
        """Reads fail from now on. May be called again."""
        self._end()
        self._descriptor = -1

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def _open_direct(path: Path) -> int | None:
    """A descriptor that reads past the cache, None where the file system has none.

    Some open the file and refuse the first read, so one block is tried.
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
