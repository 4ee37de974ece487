"""A growable array of integers with amortised O(1) append and a numpy view of its contents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.core.tokens import IntArray


class IntVector:
    """A vector of [size] int64 values. A view of it is valid until the next append or extend."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: Sequence[int] | IntArray = ()) -> None:
        self._data: IntArray = np.array(values, dtype=np.int64)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    @property
    def array(self) -> IntArray:
        """[size] the values. It is a view: writing to it changes the vector."""
        return self._data[: self._size]

    def append(self, value: int) -> None:
        self._reserve(self._size + 1)
        self._data[self._size] = value
        self._size += 1

    def extend(self, values: Sequence[int] | IntArray) -> None:
        end = self._size + len(values)
        self._reserve(end)
        self._data[self._size : end] = values
        self._size = end

    def shorten(self, size: int) -> IntArray:
        """Drop the values from `size` on and return them. The result is valid until the next change."""
        dropped = self._data[size : self._size]
        self._size = min(size, self._size)
        return dropped

    def _reserve(self, size: int) -> None:
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data), 16), dtype=np.int64)
            grown[: self._size] = self.array
            self._data = grown
