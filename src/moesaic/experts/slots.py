"""Experts' weights in memory of this process, where a server does not leave them in the mapped files.

Experts of one layout are all of one size, so each has a slot, and a slot that was given back is used first:
however often experts move between servers, memory grows with the most that were held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moesaic.models.pages import aligned, huge_pages

Bytes = npt.NDArray[np.uint8]
CHUNK = 64 << 20
"""Bytes that are mapped at a time, or a slot's where that is more."""


class Slots:
    """Room for one expert's matrices each.

    >>> slots = Slots([3, 5])
    >>> slot, parts = slots.copy([np.full(3, 7, np.uint8), np.full(5, 9, np.uint8)])
    >>> parts[1].tolist()
    [9, 9, 9, 9, 9]
    >>> slots.give_back(slot)
    >>> slots.copy(parts)[0] is slot
    True
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of each matrix."""
        self._sizes = tuple(sizes)
        self._slot = sum(map(aligned, sizes))
        self._free: list[Bytes] = []

    def copy(self, parts: Sequence[Bytes]) -> tuple[Bytes, list[Bytes]]:
        """A slot, and the matrices in it."""
        if not self._free:
            self._grow()
        slot, copies, begin = self._free.pop(), [], 0
        for part, size in zip(parts, self._sizes, strict=True):
            copy = slot[begin : begin + size]
            copy[:] = part
            copies.append(copy)
            begin += aligned(size)
        return slot, copies

    def give_back(self, slot: Bytes) -> None:
        """Nobody reads it any more."""
        self._free.append(slot)

    def _grow(self) -> None:
        slots = max(1, CHUNK // self._slot)
        memory = np.frombuffer(huge_pages(slots * self._slot), dtype=np.uint8)
        self._free = [memory[i * self._slot : (i + 1) * self._slot] for i in reversed(range(slots))]
