"""Memory for the weights of experts that are copied, not mapped from the checkpoint's files.

All experts of a layout have the same size, so each gets a slot. Slots that were given back are used again
first. So memory grows only with the maximum number of experts loaded at a time, however often experts move
between servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moesaic.models.pages import align_size, huge_pages

Bytes = npt.NDArray[np.uint8]
CHUNK = 64 << 20
"""Bytes that are allocated at a time, or one slot if that is larger."""


class Slots:
    """Slots that have room for the matrices of one expert each. A matrix may be smaller than its room.

    >>> slots = Slots([3, 5])
    >>> slot, parts = slots.copy([np.full(3, 7, np.uint8), np.full(5, 9, np.uint8)])
    >>> parts[1].tolist()
    [9, 9, 9, 9, 9]
    >>> slots.give_back(slot)
    >>> slots.copy(parts)[0] is slot
    True
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of each matrix of an expert, or more."""
        self._sizes = tuple(sizes)
        self._slot = sum(map(align_size, sizes))
        self._free: list[Bytes] = []

    def copy(self, parts: Sequence[Bytes]) -> tuple[Bytes, list[Bytes]]:
        """Copy the matrices into a slot. Returns the slot and its views of the matrices."""
        if not self._free:
            self._grow()
        slot, copies, begin = self._free.pop(), [], 0
        for part, size in zip(parts, self._sizes, strict=True):
            copy = slot[begin : begin + len(part)]
            copy[:] = part
            copies.append(copy)
            begin += align_size(size)
        return slot, copies

    def give_back(self, slot: Bytes) -> None:
        """Return a slot that is not read any more."""
        self._free.append(slot)

    def _grow(self) -> None:
        slots = max(1, CHUNK // self._slot)
        memory = np.frombuffer(huge_pages(slots * self._slot), dtype=np.uint8)
        self._free = [memory[i * self._slot : (i + 1) * self._slot] for i in reversed(range(slots))]
