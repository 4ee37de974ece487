"""The link between two levels that are both memory of this machine, with an adjustable speed."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
PIECE = 1 << 20
"""Bytes copied between two looks at the clock."""


class Link:
    """A link in one direction. The tasks on a link's lane use it one after the other.

    speed: bytes/s; None means unlimited. A link slower than this machine's memory shows how a schedule
    performs on other hardware. The copies are real.
    """

    def __init__(self, speed: float | None = None) -> None:
        self._speed = speed
        self.copied_bytes = 0
        """Bytes copied so far."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a dense copy."""
        target = torch.empty(source.shape, dtype=source.dtype)
        self.fill(_bytes(target), _bytes(source.contiguous()))
        return target

    def fill(self, target: Bytes, source: Bytes) -> None:
        """Copies `source` to the start of `target`."""
        # In pieces, so that a slow link spreads the copy over its time instead of sleeping after it.
        begin = time.monotonic()
        for offset in range(0, len(source), PIECE):
            np.copyto(target[offset : offset + PIECE], source[offset : offset + PIECE])
            self._wait(begin, min(offset + PIECE, len(source)))
        self.copied_bytes += len(source)

    def gather(self, target: torch.Tensor, source: torch.Tensor, indices: torch.Tensor) -> None:
        """Copies source[chosen] [c, ...] to the dense tensor target [c, ...]."""
        begin = time.monotonic()
        torch.index_select(source, 0, indices, out=target)
        self._wait(begin, target.nbytes)
        self.copied_bytes += target.nbytes

    def finish(self) -> None:
        """Waits until the calling thread's copies and computations are complete. Here they always are."""

    def _wait(self, begin: float, size: int) -> None:
        """Sleeps until the link would have transferred `size` bytes since `begin`."""
        if self._speed is not None:
            ahead = begin + size / self._speed - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


class MappedFile:
    """A checkpoint file in memory, the slow level. `offload.reading.DirectFile` reads from a disk."""

    direct = False

    def __init__(self, path: Path, link: Link) -> None:
        """Raises OSError as `open` does, and ValueError for an empty file."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        np.frombuffer(self._bytes, np.uint8)[:: mmap.PAGESIZE].max()  # reads every page into memory
        self._link = link

    def read(self, offset: int, target: memoryview) -> int:
        """Copies the bytes from `offset` to `target`, over the link. Returns the number of bytes."""
        source = np.frombuffer(self._bytes, np.uint8)[offset : offset + len(target)]
        self._link.fill(np.frombuffer(target, np.uint8)[: len(source)], source)
        return len(source)

    def close(self) -> None:
        """Does nothing: the mapping ends when no array refers to it."""


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a dense tensor without copying them."""
    data: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return data
