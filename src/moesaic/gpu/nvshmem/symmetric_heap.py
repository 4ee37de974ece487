"""Memory of GPUs that processes of several hosts write into from their own GPUs, by NVSHMEM.

All processes of a job allocate a heap of the same size. So a place in it has the same offset everywhere, and
who writes names a process by its number (PE, processing element) and a place by the offset. A write may carry
a signal: a word of 8 bytes at the receiver, which changes once the bytes before it have arrived.

A job is formed once: all of its processes call `join` together. NVSHMEM has no way to leave a job, or to take
the place of a process that died. The others go on, as long as they write nothing to it.

`gpu.triton.nvshmem` has the calls of kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch

from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem.package import check_installed
from moesaic.kernels.pointers import tensor_at


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

    def await_signal(self, signal: int, number: int) -> None:
        """What the current stream does from now on sees everything that was written before the own word at
        `signal` became `number`, which it is. Words only grow."""
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
    """NVIDIA's bindings of the host library. Raises ConfigError if they are not installed or do not load."""
    check_installed()
    with _in_one_line("NVIDIA's library does not load"):
        importlib.import_module("nvshmem.core").get_version()  # loads the library
        return importlib.import_module("nvshmem.bindings")


class Nvshmem:
    """SymmetricJobs by NVIDIA's host library, in the context that torch uses."""

    def __init__(self, device: torch.device) -> None:
        self._bindings = bindings()
        self._core = importlib.import_module("nvshmem.core")
        self._device = torch.device("cuda", device.index or 0)

    def unique_id(self) -> bytes:
        with _in_one_line("no name for a job"):
            job_name = self._core.get_unique_id()
        return ctypes.string_at(job_name.ptr, _size(job_name))

    def join(self, unique_id: bytes, pe: int, pes: int, size: int) -> SymmetricHeap:
        name = self._core.get_unique_id(empty=True)
        if len(unique_id) != _size(name):
            raise _nvshmem_error(f"a name of {len(unique_id)} bytes; this version's have {_size(name)}")
        if self._status() != "STATUS_NOT_INITIALIZED":
            raise _nvshmem_error("this process has joined a job before")
        ctypes.memmove(name.ptr, unique_id, len(unique_id))
        with torch.cuda.device(self._device):
            with _in_one_line(f"PE {pe} of {pes} cannot join; NVSHMEM_DEBUG=WARN says more"):
                device = importlib.import_module("cuda.core").Device(self._device.index)
                device.set_current()
                self._core.init(device=device, uid=name, rank=pe, nranks=pes, initializer_method="uid")
            if self._status() == "STATUS_LIMITED_MPG":
                raise _nvshmem_error("two processes of the job have the same GPU; each needs its own")
            return _Heap(self._bindings, pe, self._zeros(size))

    def _zeros(self, size: int) -> torch.Tensor:
        """The own heap. All processes of the job call this together."""
        with _in_one_line("the symmetric heap"):
            address = self._bindings.malloc(size)
        if not address:
            raise _nvshmem_error(
                f"no {size} bytes for the symmetric heap; NVSHMEM_SYMMETRIC_SIZE may limit it"
            )
        tensor = tensor_at(int(address), size, self._device)
        tensor.zero_()
        stream = torch.cuda.current_stream(self._device)
        self._bindings.barrier_all_on_stream(int(stream.cuda_stream))  # nobody writes before all is zeros
        stream.synchronize()  # unlike NVSHMEM's own barrier it lets other threads run
        return tensor

    def _status(self) -> str:
        """The name of NVSHMEM's status in this process."""
        return str(self._bindings.Init_status(self._bindings.init_status()).name)


class _Heap:
    """SymmetricHeap at an address that NVSHMEM gave."""

    def __init__(self, library: Any, pe: int, tensor: torch.Tensor) -> None:
        self.pe, self.tensor = pe, tensor
        self._library, self._address = library, tensor.data_ptr()

    def put(self, target: int, source: int, size: int, signal: int, number: int, pe: int) -> None:
        target, source, signal = (self._address + place for place in (target, source, signal))
        signal_operation = int(self._library.Signal_op.SIGNAL_SET)
        if size:
            put = self._library.putmem_signal_on_stream
            put(target, source, size, signal, number, signal_operation, pe, self._stream)
        else:  # a network card may take 0 bytes for 2 GiB
            self._library.signal_op_on_stream(signal, number, signal_operation, pe, self._stream)

    def await_signal(self, signal: int, number: int) -> None:
        comparison = int(self._library.Cmp_type.CMP_GE)
        self._library.signal_wait_until_on_stream(self._address + signal, comparison, number, self._stream)

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.tensor.device).cuda_stream)


def _size(unique_id: Any) -> int:
    """Bytes of a unique ID."""
    return int(unique_id._data.nbytes)


def _nvshmem_error(reason: str) -> ConfigError:
    return ConfigError(f"--transport nvshmem: {reason}")


@contextlib.contextmanager
def _in_one_line(action: str) -> Iterator[None]:
    """Errors of the bindings, which are of classes of their own, become a ConfigError of one line."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise _nvshmem_error(f"{action}: {reason}") from error
