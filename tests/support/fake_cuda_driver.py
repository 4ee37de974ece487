"""`cuda.bindings.driver` without a GPU: checks the order of calls, as the driver documents it.

Memory of the device is ordinary memory of this process, at its own address. Processes are numbers: a driver
opens what another one, of the same `Machine`, exported.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

SUCCESS, INVALID_VALUE, INVALID_CONTEXT, OUT_OF_MEMORY, MAP_FAILED = 0, 1, 201, 2, 205
WORDS = {INVALID_VALUE: "invalid argument", INVALID_CONTEXT: "invalid device context",
         OUT_OF_MEMORY: "out of memory", MAP_FAILED: "mapping of buffer object failed"}  # fmt: skip


@dataclass
class Machine:
    """What the processes of a host share."""

    memory: dict[int, Any] = field(default_factory=dict)
    """Allocated, by address."""
    handles: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Handle -> process and address."""
    opened: dict[int, int] = field(default_factory=dict)
    """How often each address is open in other processes."""
    free: int = 1 << 30
    peers: bool = True


class Handle:
    """CUipcMemHandle."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def contents(self) -> bytes:
        return self._bytes.raw


class FakeDriver:
    """The driver of one process. Each wrong call is an error of the driver or an AssertionError."""

    CUipcMemHandle = Handle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self, machine: Machine, process: int) -> None:
        self._machine, self._process = machine, process
        self._ready = self._retained = False
        self._current: list[str] = []
        self._open: dict[int, int] = {}
        self._registered: set[int] = set()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> tuple[int]:
        self._ready = True
        return (SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        assert self._ready
        return SUCCESS, 100 + ordinal

    def cuDeviceCanAccessPeer(self, mine: int, other: int) -> tuple[int, int]:
        assert mine != other
        return SUCCESS, int(self._machine.peers)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:
        assert device >= 100
        self._retained = True
        return SUCCESS, "primary"

    def cuCtxPushCurrent(self, context: str) -> tuple[int]:
        assert self._retained
        self._current.append(context)
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[int, str]:
        return SUCCESS, self._current.pop()

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        if not self._current:
            return INVALID_CONTEXT, 0
        if size > self._machine.free:
            return OUT_OF_MEMORY, 0
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self._machine.memory[address] = memory
        return SUCCESS, address

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, Handle | None]:
        if not self._current or address not in self._machine.memory:
            return INVALID_VALUE, None
        handle = Handle()
        ctypes.memmove(handle.getPtr(), f"handle {address}".encode(), len(f"handle {address}"))
        self._machine.handles[handle.contents] = self._process, address
        return SUCCESS, handle

    def cuCtxSynchronize(self) -> tuple[int]:
        return (SUCCESS if self._current else INVALID_CONTEXT,)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        if not self._current or address not in self._machine.memory:
            return INVALID_VALUE, 0, 0
        return SUCCESS, address, len(self._machine.memory[address])

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int]:
        assert flags == 1, "the only flag that it takes"
        if not self._current:
            return INVALID_CONTEXT, 0
        process, address = self._machine.handles.get(handle.contents, (0, 0))
        if process == self._process:
            return INVALID_CONTEXT, 0
        if address not in self._machine.memory:
            return MAP_FAILED, 0
        self._open[address] = self._open.get(address, 0) + 1
        self._machine.opened[address] = self._machine.opened.get(address, 0) + 1
        return SUCCESS, address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        if not self._current or not self._open.get(address):
            return (INVALID_VALUE,)
        self._open[address] -= 1
        self._machine.opened[address] -= 1
        return (SUCCESS,)

    def cuMemFree(self, address: int) -> tuple[int]:
        assert not self._machine.opened.get(address), "freed while another process has it open"
        if not self._current or self._machine.memory.pop(address, None) is None:
            return (INVALID_VALUE,)
        return (SUCCESS,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        assert flags == 3 and address % 4096 == 0
        if not self._current or address in self._registered:
            return (INVALID_VALUE,)
        self._registered.add(address)
        return (SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return (SUCCESS, address) if address in self._registered else (INVALID_VALUE, 0)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        if address not in self._registered:
            return (INVALID_VALUE,)
        self._registered.remove(address)
        return (SUCCESS,)

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:
        return SUCCESS, WORDS[error].encode()
