"""Memory for the results of native operations: fresh memory, or lasting memory while a step is recorded."""

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
"""Bytes from which on results do not come from torch. Torch uses glibc's aligned allocation, which does not
reuse the room of an equally large freed result. A prefill took 170 MB more than it needs."""


class Arena:
    """Memory that recorded steps share. Later operations of a step reuse what it no longer needs, in the
    same order at every replay. Two steps never run at once."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory. It is free again when no tensor uses it any more."""
        size = max(1, math.prod(shape) * dtype.itemsize)
        # Powers of two: results of similar size can take each other's memory, at less than twice the bytes.
        size = 1 << (size - 1).bit_length()
        memory = self._free[size].pop() if self._free[size] else _allocate(size)
        view = memory[: math.prod(shape) * dtype.itemsize]
        # The tensor's storage owns `view`, so it ends with the last tensor that uses it.
        weakref.finalize(view, self._free[size].append, memory)
        return _view_memory(view, shape, dtype)


class Memory(threading.local):
    """Provides memory for results. Each thread records for itself."""

    def __init__(self) -> None:
        self.arena: Arena | None = None
        """The arena, while a step is recorded."""
        self.kept_tensors: list[torch.Tensor] = []
        self.freed_memory: list[Bytes] | None = None
        """Memory of large freed results, to be reused; None: it goes back to the system, see
        `reuse_memory`."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised memory on the CPU."""
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        if size < LARGE:
            return torch.empty(shape, dtype=dtype)
        return _view_memory(
            _allocate(size) if self.freed_memory is None else _reuse_freed(size, self.freed_memory),
            shape,
            dtype,
        )

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keeps a tensor of the caller alive as long as the recording, which writes to it at every run."""
        if self.arena is not None:
            self.kept_tensors.append(tensor)
        return tensor


MEMORY = Memory()


@contextmanager
def reuse_memory() -> Generator[None]:
    """A context in which large results of the calling thread reuse memory of freed results. Where the C
    library gives freed memory back to the system, its pages are faulted in again in each layer: norms
    and rotations of an offloaded prefill took 4 to 6 times as long. At the end only memory of live
    results is kept."""
    freed_memory: list[Bytes] = []
    previous, MEMORY.freed_memory = MEMORY.freed_memory, freed_memory
    try:
        yield
    finally:
        MEMORY.freed_memory = previous
        freed_memory.clear()


def _reuse_freed(size: int, freed_memory: list[Bytes]) -> Bytes:
    """The smallest freed memory that is large enough but not twice as large, else new memory. It returns to
    `freed_memory` when no tensor uses it any more."""
    candidates = [place for place, memory in enumerate(freed_memory) if size <= len(memory) < 2 * size]
    best = min(candidates, key=lambda place: len(freed_memory[place]), default=None)
    memory = _allocate(size) if best is None else freed_memory.pop(best)
    view = memory[:size]
    weakref.finalize(view, freed_memory.append, memory)
    return view


def _allocate(size: int) -> Bytes:
    # numpy aligns to 16 bytes only. A vector of AVX-512 that crosses a cache line takes two loads.
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _view_memory(memory: Bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape)
