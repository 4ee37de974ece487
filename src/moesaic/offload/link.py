"""The link between levels that are both memory of this machine: copies that take as long as is said."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
PIECE = 1 << 20
"""Bytes copied before the clock is looked at."""


class Link:
    """One direction. What stands on a link's lane goes over it one thing at a time.

    speed: bytes/s; None: as fast as it is copied. A slower link than the machine's own memory shows what a
    schedule is worth on hardware that is not there; the copies are real.
    """

    def __init__(self, speed: float | None = None) -> None:
        self._speed = speed
        self.moved = 0
        """Bytes so far."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """The same numbers in new, dense memory."""
        target = torch.empty(source.shape, dtype=source.dtype)
        self.fill(_bytes(target), _bytes(source.contiguous()))
        return target

    def fill(self, target: Bytes, source: Bytes) -> None:
        """Copies as many bytes as there are."""
        begin = time.monotonic()
        for at in range(0, len(source), PIECE):
            np.copyto(target[at : at + PIECE], source[at : at + PIECE])
            self._wait(begin, min(at + PIECE, len(source)))
        self.moved += len(source)

    def gather(self, target: torch.Tensor, source: torch.Tensor, chosen: torch.Tensor) -> None:
        """Copies source[chosen] [c, ...] to target [c, ...], which is dense."""
        begin = time.monotonic()
        torch.index_select(source, 0, chosen, out=target)
        self._wait(begin, target.nbytes)
        self.moved += target.nbytes

    def finish(self) -> None:
        """Until what the calling thread copied, or computed, is there: here it is."""

    def _wait(self, begin: float, size: int) -> None:
        """Until so many bytes may have come."""
        if self._speed is not None:
            ahead = begin + size / self._speed - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


class MappedFile:
    """A checkpoint's file in memory, the slow level, as `offload.reading.DirectFile` is one on a disk."""

    direct = False

    def __init__(self, path: Path, link: Link) -> None:
        """Raises OSError like `open`, ValueError for an empty file."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        np.frombuffer(self._bytes, np.uint8)[:: mmap.PAGESIZE].max()  # all of it is in memory now
        self._link = link

    def read(self, offset: int, into: memoryview) -> int:
        """The bytes from `offset` on to `into`, over the link. Returns how many."""
        source = np.frombuffer(self._bytes, np.uint8)[offset : offset + len(into)]
        self._link.fill(np.frombuffer(into, np.uint8)[: len(source)], source)
        return len(source)

    def close(self) -> None:
        """Reads fail from now on, once nothing looks at the bytes any more."""


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Of a dense tensor, in place."""
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found
