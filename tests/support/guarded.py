"""Tensors that end directly before memory that cannot be accessed."""

from __future__ import annotations

import ctypes
import mmap

import torch

NO_ACCESS = 0
"""PROT_NONE of sys/mman.h: memory that cannot be accessed."""


class Guarded:
    """Copies of tensors that end directly before memory that cannot be accessed."""

    def __init__(self) -> None:
        self.protect = ctypes.CDLL(None, use_errno=True).mprotect
        self.maps: list[mmap.mmap] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        self.maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        done = self.protect(ctypes.c_void_p(start + room), ctypes.c_size_t(mmap.PAGESIZE), NO_ACCESS)
        assert done == 0
        copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size)
        return copy.view(tensor.shape).copy_(tensor)
