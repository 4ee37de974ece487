"""Memory that the GPUs of several processes of a host share, by CUDA IPC.

A process exports memory of its own GPU and sends the name to another process, which opens it. The name has
the handle that the driver gives, so it means nothing on another host. Opened memory belongs to the address
space of the opener's own GPU, and its tensors say that they are on that GPU: its kernels and copies read and
write it by NVLink or PCIe, in order of its own streams. So no process needs a context on another GPU.

The GPU of the exporting process need not be visible to the opener (since CUDA 10.1). Where it is, peer access
is checked first. Otherwise the driver says whether it is possible.

Rules of CUDA that callers keep:

- Memory must not be freed while another process has it open.
- A process cannot open what it exported itself.
- Nothing orders the work of two GPUs. A process that wrote waits for its stream before it tells the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConfigError, DamagedMessage
from moesaic.kernels.pointers import tensor_at

INSTALL = "pip install cuda-bindings"
BLOCK = 2 << 20
"""Exported memory is a multiple of so many bytes. The driver shares whole blocks of this size, so smaller
memory would show the other process what else lies in its block."""
PAGE = 4096
_NAME = struct.Struct("<4s44s64sQI")
"""Magic, the GPU's UUID, the handle, bytes, and the exporting process."""
_MAGIC = b"CIM1"
NAME_BYTES = _NAME.size


class SharedMemory(Protocol):
    """Memory that GPUs of several processes read and write."""

    @property
    def name(self) -> bytes:
        """What another process opens it by. Empty for memory that this process opened, or of the host."""
        ...

    @property
    def tensor(self) -> torch.Tensor:
        """[size] uint8 on the own GPU. It is not valid after `close`."""
        ...

    def close(self) -> None:
        """Free exported memory, or give opened memory back.

        Nothing may be under way on the own GPU that uses it. A repeated call does nothing.
        """
        ...


class DeviceSharing(Protocol):
    """Makes memory of one GPU known to other processes, and opens theirs. Any thread may call it."""

    def export(self, size: int) -> SharedMemory:
        """Allocate at least `size` bytes of the own GPU, rounded up to BLOCK.

        Raises ConfigError if the GPU has no room.
        """
        ...

    def open(self, name: bytes) -> SharedMemory:
        """Open memory that another process of this host exported.

        Raises DamagedMessage for what is no name, and ConfigError where the GPUs cannot share memory.
        """
        ...

    def map_host(self, memory: npt.NDArray[np.uint8]) -> SharedMemory:
        """Let the own GPU read and write this memory of the host, in place.

        memory: [size] whole pages that stay mapped until `close`. Other processes may map them too. Raises
        ConfigError if the driver refuses.
        """
        ...


def sharing(device: torch.device) -> DeviceSharing:
    """The DeviceSharing of a GPU. Raises ConfigError if NVIDIA's bindings are not installed."""
    return CudaIpc(device)


def check_installed() -> None:
    """Raises ConfigError if NVIDIA's bindings of the driver are not installed."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        allowed_values = f"auto, shm, socket (NVIDIA's cuda-bindings are not installed: {INSTALL})"
        raise ConfigError.field("--transport", "cuda_ipc", allowed_values)


@cache
def _driver() -> Any:
    check_installed()
    return importlib.import_module("cuda.bindings.driver")


class CudaIpc:
    """DeviceSharing by NVIDIA's driver, in the context that torch uses."""

    def __init__(self, device: torch.device) -> None:
        self._driver = _driver()
        self._device = torch.device("cuda", device.index or 0)
        self._uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        self._call("cuInit", 0)
        self._number = self._call("cuDeviceGet", self._device.index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._number)

    def export(self, size: int) -> SharedMemory:
        size = -(-size // BLOCK) * BLOCK
        with self._current():
            address = self._call("cuMemAlloc", size)
            handle = self._call("cuIpcGetMemHandle", address)
        contents = ctypes.string_at(handle.getPtr(), 64)
        name = _NAME.pack(_MAGIC, self._uuid.encode(), contents, size, os.getpid())
        return _DriverMemory(self, name, tensor_at(int(address), size, self._device), "cuMemFree", address)

    def open(self, name: bytes) -> SharedMemory:
        uuid, contents, size = self._read(name)
        self._check_peer(uuid)
        handle = self._driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), contents, len(contents))
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with self._current():
            address = self._call("cuIpcOpenMemHandle", handle, flags)
            _, allocation_size = self._results("cuMemGetAddressRange", address)
            if size > int(allocation_size):
                self._call("cuIpcCloseMemHandle", address)
                raise DamagedMessage(f"memory of {allocation_size} bytes of a GPU is named as {size} bytes")
        tensor = tensor_at(int(address), size, self._device)
        return _DriverMemory(self, b"", tensor, "cuIpcCloseMemHandle", address)

    def map_host(self, memory: npt.NDArray[np.uint8]) -> SharedMemory:
        address, size = memory.ctypes.data, memory.nbytes
        if address % PAGE or size % PAGE or not size:
            raise ValueError(f"{size} bytes at {address:#x} are not whole pages")
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._current():
            self._call("cuMemHostRegister", address, size, flags)
            device_address = self._call("cuMemHostGetDevicePointer", address, 0)
        tensor = tensor_at(int(device_address), size, self._device)
        return _DriverMemory(self, b"", tensor, "cuMemHostUnregister", address, memory)

    def give_back(self, function: str, address: Any) -> None:
        """Call the driver's function `function` with an address.

        Memory of another process is closed when the own GPU has done all work, which may read it.
        """
        with self._current():
            if function == "cuIpcCloseMemHandle":
                self._call("cuCtxSynchronize")
            self._call(function, address)

    @staticmethod
    def _read(name: bytes) -> tuple[str, bytes, int]:
        """The UUID, the handle and the bytes of a name."""
        if len(name) != NAME_BYTES or not name.startswith(_MAGIC):
            raise DamagedMessage(f"{len(name)} bytes do not name memory of a GPU")
        _, uuid, contents, size, process = _NAME.unpack(name)
        if process == os.getpid():
            raise ConfigError("--transport cuda_ipc: a process cannot open memory that it exported itself")
        return uuid.rstrip(b"\0").decode("ascii", "replace"), contents, size

    def _check_peer(self, uuid: str) -> None:
        """Raises ConfigError if the own GPU cannot reach the one with this UUID."""
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) != uuid or uuid == self._uuid:
                continue
            peer_device = self._call("cuDeviceGet", index)
            if not self._call("cuDeviceCanAccessPeer", self._number, peer_device):
                raise _driver_error(f"GPUs {self._uuid} and {uuid} have no peer access to each other")

    def _call(self, name: str, *arguments: Any) -> Any:
        """The first result of a function of the driver. Raises as `_results`."""
        results = self._results(name, *arguments)
        return results[0] if results else None

    def _results(self, name: str, *arguments: Any) -> list[Any]:
        """What a function of the driver returns. Raises ConfigError with the driver's own words."""
        results: list[Any]
        error, *results = getattr(self._driver, name)(*arguments)
        if int(error):
            _, text = self._driver.cuGetErrorString(error)
            words = text.decode() if isinstance(text, bytes) else str(error)
            raise _driver_error(f"{name} on GPU {self._uuid}: {words}")
        return results

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """torch's context is the calling thread's."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")


class _DriverMemory:
    """SharedMemory at an address that the driver gave."""

    def __init__(
        self,
        ipc: CudaIpc,
        name: bytes,
        tensor: torch.Tensor,
        release_function: str,
        address: Any,
        owner: object = None,
    ) -> None:
        """release_function: the driver's function that gives it back. owner: lives on until then."""
        self.name, self.tensor = name, tensor
        self._ipc, self._release_function, self._address, self._owner = ipc, release_function, address, owner
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ipc.give_back(self._release_function, self._address)
            self._owner = None


def _driver_error(reason: str) -> ConfigError:
    return ConfigError(f"--transport cuda_ipc: {reason}")
