"""Reuses memory blocks.

Reusing a page costs nothing, while the first write to a new one causes a page fault.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SMALLEST = 12
"""log2 of the bytes of the smallest block."""

Block = npt.NDArray[np.uint8]


class Blocks:
    """Memory blocks whose sizes are powers of two. At most `keep_bytes` of unused blocks are kept.

    >>> blocks = Blocks(1 << 20)
    >>> first = blocks.take(5000)
    >>> len(first)
    8192
    >>> blocks.give_back(first)
    >>> blocks.take(6000) is first
    True
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: dict[int, list[Block]] = {}
        self._idle_bytes = 0

    def take(self, count: int) -> Block:
        """A block of at least `count` bytes with arbitrary contents."""
        size = 1 << max(_SMALLEST, (count - 1).bit_length())
        idle = self._idle.get(size)
        if not idle:
            return np.empty(size, np.uint8)
        self._idle_bytes -= size
        return idle.pop()

    def give_back(self, block: Block) -> None:
        """Return a block, which may be reused and overwritten from now on."""
        if self._idle_bytes + len(block) > self._keep_bytes:
            self._idle.clear()
            self._idle_bytes = 0
        self._idle.setdefault(len(block), []).append(block)
        self._idle_bytes += len(block)
