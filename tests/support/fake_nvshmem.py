"""NVIDIA's host library of NVSHMEM without a GPU: checks the order of calls, and their arguments.

Processes are objects, and a job is what those with the same unique ID join. Memory of the device is ordinary
memory of this process, full of ones at first. What is told to a stream is done at once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

STREAM = 0x5EA
"""The stream that calls must name."""
ID_BYTES = 128


class InitStatus(IntEnum):
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2
    STATUS_LIMITED_MPG = 3
    STATUS_FULL_MPG = 4


class SignalOp(IntEnum):
    SIGNAL_SET = 9


class CmpType(IntEnum):
    CMP_GE = 5


class NVSHMEMError(Exception):
    """As of the bindings, which say no more."""

    def __init__(self, status: int) -> None:
        super().__init__(f"Status code {status}")


class NvshmemInvalid(Exception):
    """As of the package."""


class UniqueId:
    """uniqueid."""

    def __init__(self, contents: bytes = b"") -> None:
        self._bytes = ctypes.create_string_buffer(contents.ljust(ID_BYTES, b"\0"), ID_BYTES)
        self._data = SimpleNamespace(nbytes=ID_BYTES)

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def contents(self) -> bytes:
        return self._bytes.raw


class Device:
    """cuda.core.Device."""

    current: int | None = None

    def __init__(self, number: int) -> None:
        self.number = number

    def set_current(self) -> None:
        Device.current = self.number


@dataclass
class Job:
    """What its processes share."""

    members: dict[int, FakeNvshmem] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Those that are in the barrier, or were."""


@dataclass
class Network:
    """What all processes share."""

    jobs: dict[bytes, Job] = field(default_factory=dict)
    free: int = 1 << 20
    """Bytes that a heap may have."""
    share_gpus: bool = False
    built: tuple[str, ...] = ("70", "80", "89", "90", "100")
    """Compute capabilities with a library for kernels."""


class FakeNvshmem:
    """The library in one process. Each wrong call is an error of the library or an AssertionError."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.loaded, self.status = False, InitStatus.STATUS_NOT_INITIALIZED
        self.job, self.rank, self.pes = Job(), -1, 0
        self.memory: Any = None
        self.calls: list[str] = []
        self.modules = {
            "nvshmem.core": _module("nvshmem.core", Core(self)),
            "nvshmem.bindings": _module("nvshmem.bindings", Bindings(self)),
            "cuda.core": _module("cuda.core", SimpleNamespace(Device=Device)),
        }

    @property
    def base(self) -> int:
        return ctypes.addressof(self.memory)

    def called(self, name: str, *numbers: Any) -> None:
        """A function of the bindings. numbers: its arguments, which must be plain ones."""
        assert self.loaded, f"{name} before the library was loaded"
        assert all(type(one) is int for one in numbers), f"{name}{numbers}"
        self.calls.append(name)

    def on_stream(self, name: str, *numbers: Any) -> None:
        """A function that tells a stream. The last number is the stream."""
        self.called(name, *numbers)
        assert self.memory is not None and numbers[-1] == STREAM, f"{name}{numbers}"

    def place(self, address: int, size: int) -> int:
        """The place of an address in the own heap."""
        place = address - self.base
        assert place >= 0 and place + size <= len(self.memory), f"{size} bytes at {place}"
        return place

    def other(self, pe: int) -> FakeNvshmem:
        assert self.job.waiting == set(range(self.pes)), "a process writes before all memory is zeros"
        return self.job.members[pe]

    def signal(self, address: int, number: int, how: int, pe: int) -> None:
        assert how == SignalOp.SIGNAL_SET and address % 8 == 0
        word = self.other(pe).base + self.place(address, 8)
        ctypes.c_uint64.from_address(word).value = number


class Core:
    """nvshmem.core."""

    NvshmemInvalid = NvshmemInvalid

    def __init__(self, library: FakeNvshmem) -> None:
        self._of = library

    def get_version(self) -> None:
        self._of.loaded = True

    def get_unique_id(self, empty: bool = False) -> UniqueId:
        if empty:
            return UniqueId()
        made = UniqueId(f"job {len(self._of._network.jobs)}".encode())
        self._of._network.jobs[made.contents] = Job()
        return made

    def init(
        self,
        device: Device | None = None,
        uid: UniqueId | None = None,
        rank: int | None = None,
        nranks: int | None = None,
        mpi_comm: None = None,
        initializer_method: str = "",
    ) -> None:
        of = self._of
        assert of.status == InitStatus.STATUS_NOT_INITIALIZED, "NVSHMEM would stay in its job"
        assert initializer_method == "uid" and uid is not None and mpi_comm is None
        assert device is not None and Device.current == device.number, "another device is current"
        assert type(rank) is int and type(nranks) is int and 0 <= rank < nranks
        of.status = InitStatus.STATUS_IS_BOOTSTRAPPED
        job = of._network.jobs.get(uid.contents)
        if job is None or rank in job.members:
            raise NVSHMEMError(7)
        job.members[rank] = of
        of.job, of.rank, of.pes = job, rank, nranks
        shared = of._network.share_gpus
        of.status = InitStatus.STATUS_LIMITED_MPG if shared else InitStatus.STATUS_IS_INITIALIZED

    def find_device_bitcode_library(self, *, arch: str) -> str:
        if arch not in self._of._network.built:
            raise NvshmemInvalid(f"libnvshmem_device_sm_{arch}.bc")
        return f"libnvshmem_device_sm_{arch}.bc"


class Bindings:
    """nvshmem.bindings."""

    NVSHMEMError = NVSHMEMError

    Init_status, Signal_op, Cmp_type = InitStatus, SignalOp, CmpType

    def __init__(self, library: FakeNvshmem) -> None:
        self._of = library

    def init_status(self) -> int:
        self._of.called("init_status")
        return int(self._of.status)

    def malloc(self, size: int) -> int:
        self._of.called("malloc", size)
        if self._of.status != InitStatus.STATUS_IS_INITIALIZED:
            raise NVSHMEMError(7)
        sizes = {len(one.memory) for one in self._of.job.members.values() if one.memory is not None}
        assert sizes <= {size}, f"heaps of {sizes} and {size} bytes"
        if size > self._of._network.free:
            return 0
        self._of.memory = (ctypes.c_uint8 * size)(*[1] * size)
        return self._of.base

    def cumodule_init(self, module: int) -> int:
        self._of.called("cumodule_init", module)
        return 0 if self._of.memory is not None else 7

    def barrier_all_on_stream(self, stream: int) -> None:
        self._of.on_stream("barrier_all_on_stream", stream)
        assert not any(self._of.memory), "the heap is not zeros"
        self._of.job.waiting.add(self._of.rank)

    def putmem_signal_on_stream(
        self, dest: int, source: int, size: int, sig_addr: int, signal: int, sig_op: int, pe: int, stream: int
    ) -> None:
        given = dest, source, size, sig_addr, signal, sig_op, pe, stream
        self._of.on_stream("putmem_signal_on_stream", *given)
        assert size > 0, "network cards may take it for 2 GiB"
        self._of.place(source, size)
        ctypes.memmove(self._of.other(pe).base + self._of.place(dest, size), source, size)
        self._of.signal(sig_addr, signal, sig_op, pe)

    def signal_op_on_stream(self, sig_addr: int, signal: int, sig_op: int, pe: int, stream: int) -> None:
        self._of.on_stream("signal_op_on_stream", sig_addr, signal, sig_op, pe, stream)
        self._of.signal(sig_addr, signal, sig_op, pe)

    def signal_wait_until_on_stream(self, sig_addr: int, cmp: int, value: int, stream: int) -> None:
        self._of.on_stream("signal_wait_until_on_stream", sig_addr, cmp, value, stream)
        self._of.place(sig_addr, 8)
        found = ctypes.c_uint64.from_address(sig_addr).value
        assert cmp == CmpType.CMP_GE and found >= value, "the stream would wait for ever"


def _module(name: str, content: Any) -> ModuleType:
    """A module with the public names of an object."""
    made = ModuleType(name)
    for one in dir(content):
        if not one.startswith("_"):
            setattr(made, one, getattr(content, one))
    return made
