"""Memory of GPUs that processes of several hosts write into from their own GPUs, by NVSHMEM.

All processes of a job allocate a heap of the same size. So a place in it has the same offset everywhere, and
who writes names a process by its number (PE, processing element) and a place by the offset. A write may carry
a signal: a word of 8 bytes at the receiver, which changes once the bytes before it have arrived.

A job is formed once: all of its processes call `join` together. NVSHMEM has no way to leave a job, or to take
the place of a process that died. The others go on, as long as they write nothing to it.

`kernels.triton.nvshmem` has the calls of kernels.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any, Protocol

import torch

from moesaic.config import environment
from moesaic.core.errors import ConfigError
from moesaic.kernels.nvshmem_package import check_installed
from moesaic.kernels.pointers import tensor_at

SLACK = 256 << 20
"""Bytes that NVSHMEM gets beyond the heap, for itself."""


class SymmetricHeap(Protocol):
    """The own part of a job's memory. Places are offsets in bytes. Used by one thread."""

    @property
    def pe(self) -> int:
        """The number of this process in the job."""
        ...

    @property
    def tensor(self) -> torch.Tensor:
        """[size] uint8 on the own GPU, zeros at first. It is never freed."""
        ...

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        """Write `size` bytes of the own heap to the place `target` of another process, then `number` into
        its word at `signal`. The current stream does it, in its order. `size` 0 sends the signal alone."""
        ...

    def arrived(self, signal: int, number: int) -> None:
        """What the current stream does from now on sees everything that was written before the own word at
        `signal` became `number`, which it is."""
        ...

    def quiet(self) -> None:
        """Wait until everything that this process wrote, also by its kernels, has arrived."""
        ...


class SymmetricJobs(Protocol):
    """Forms jobs."""

    def unique_id(self) -> bytes:
        """The name of a new job, for all of its processes. The process that calls it should be PE 0."""
        ...

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> SymmetricHeap:
        """Join a job of `pes` processes, as its process `pe`, with a heap of `size` bytes.

        It returns when all processes have joined. Raises ConfigError where NVSHMEM refuses.
        """
        ...


def jobs(device: torch.device) -> SymmetricJobs:
    """The SymmetricJobs of a GPU. Raises ConfigError if nvshmem4py is not installed."""
    return Nvshmem(device)


@cache
def bindings() -> Any:
    """NVIDIA's bindings of the host library. Raises ConfigError if they are not installed."""
    check_installed()
    importlib.import_module("nvshmem.core").get_version()  # loads the library
    return importlib.import_module("nvshmem.bindings")


class Nvshmem:
    """SymmetricJobs by NVIDIA's host library, in the context that torch uses."""

    def __init__(self, device: torch.device) -> None:
        self._bindings = bindings()
        self._core = importlib.import_module("nvshmem.core")
        self._device = torch.device("cuda", device.index or 0)

    def unique_id(self) -> bytes:
        made = self._core.get_unique_id()
        return ctypes.string_at(made.ptr, _size(made))

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> SymmetricHeap:
        name = self._core.get_unique_id(empty=True)
        if len(unique_id) != _size(name):
            raise _refused(f"a name of {len(unique_id)} bytes; this version's have {_size(name)}")
        ctypes.memmove(name.ptr, unique_id, len(unique_id))
        environment.allow_symmetric_heap(size + SLACK)
        device = importlib.import_module("cuda.core").Device(self._device.index)
        with torch.cuda.device(self._device):
            try:
                device.set_current()
                self._core.init(device=device, uid=name, rank=pe, nranks=pes, initializer_method="uid")
                address = self._bindings.malloc(size)
            except Exception as error:  # the bindings have errors of their own
                raise _refused(str(error)) from error
            if not address:
                raise _refused(f"no {size} bytes for the symmetric heap")
            tensor = tensor_at(int(address), size, self._device)
            tensor.zero_()
            torch.cuda.synchronize(self._device)
            self._bindings.barrier_all()  # nobody writes before all memory is zeros
        return _Heap(self._bindings, pe, tensor)


class _Heap:
    """SymmetricHeap at an address that NVSHMEM gave."""

    def __init__(self, library: Any, pe: int, tensor: torch.Tensor) -> None:
        self.pe, self.tensor = pe, tensor
        self._library, self._address = library, tensor.data_ptr()

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        target, source, signal = (self._address + place for place in (target, source, signal))
        put, how = self._library.putmem_signal_on_stream, int(self._library.Signal_op.SIGNAL_SET)
        put(target, source, size, signal, number, how, pe, self._stream)

    def arrived(self, signal: int, number: int) -> None:
        how = int(self._library.Cmp_type.CMP_EQ)
        self._library.signal_wait_until_on_stream(self._address + signal, how, number, self._stream)

    def quiet(self) -> None:
        self._library.quiet_on_stream(self._stream)
        torch.cuda.current_stream(self.tensor.device).synchronize()

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.tensor.device).cuda_stream)


def _size(unique_id: Any) -> int:
    """Bytes of a unique ID."""
    return int(unique_id._data.nbytes)


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--transport nvshmem: {reason}")
