"""Where results of native operations lie: fresh memory, or, while a step is recorded, memory that stays."""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 64
LARGE = 1 << 20
"""Bytes from which on results do not come from torch: it calls glibc's aligned allocation, which does not
find the room that a result of the same size left, so that a prefill took 170 MB more than it needs."""


class Arena:
    """Memory that recorded steps share. What a step no longer needs is used again by its later operations,
    in the same order at every replay; two steps never run at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised. It is free again when no tensor looks at it any more."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        size = 1 << (size - 1).bit_length()
        memory = self._free[size].pop() if self._free[size] else _aligned(size)
        view = memory[: math.prod(shape) * dtype.itemsize]
        # The tensor's storage owns `view`, so it ends with the last tensor over it.
        weakref.finalize(view, self._free[size].append, memory)
        return _over(view, shape, dtype)


class Memory(threading.local):
    """Hands out memory for results. Each thread records for itself."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        """Set while a step is recorded."""
        self.kept: list[torch.Tensor] = []
        self.ended: list[Bytes] | None = None
        """Of large results that ended, to be used again; None: the system gets it back, see `reusing`."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised, on the CPU."""
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        return _over(_aligned(size) if self.ended is None else _again(size, self.ended), shape, dtype)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the caller's that a recording will write again must live as long as the recording."""
        if self.arena is not None:
            self.kept.append(tensor)
        return tensor


MEMORY = Memory()


@contextmanager
def reusing() -> Generator[None]:
    """Within it large results of the calling thread take the memory of those that ended: where the C library
    gives each back to the system, its pages come anew at each layer: norms and rotations of an offloaded
    prefill took 4 to 6 times as long. Nothing is held when it ends but what results still take.
    """
    ended: list[Bytes] = []
    before, MEMORY.ended = MEMORY.ended, ended
    try:
        yield
    finally:
        MEMORY.ended = before
        ended.clear()


def _again(size: int, ended: list[Bytes]) -> Bytes:
    """The smallest that is large enough, though not twice as large, else new memory; back in `ended` when no
    tensor looks at it."""
    enough = [place for place, memory in enumerate(ended) if size <= len(memory) < 2 * size]
    best = min(enough, key=lambda place: len(ended[place]), default=None)
    memory = _aligned(size) if best is None else ended.pop(best)
    view = memory[:size]
    weakref.finalize(view, ended.append, memory)
    return view


def _aligned(size: int) -> Bytes:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _over(memory: Bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape)
