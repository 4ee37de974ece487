"""Memory that GPUs of several processes share: the order of the driver's calls, on a driver that is none.

Drivers of two processes are two objects here. Real processes share files in place of a GPU's memory, in
`tests/gpu/test_shared_memory.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.fake_cuda_driver import FakeDriver, Machine

from moesaic.core.errors import ConfigError, DamagedMessage
from moesaic.gpu.ipc import device_sharing
from moesaic.gpu.ipc.device_sharing import _NAME, BLOCK, NAME_BYTES, CudaIpc
from moesaic.kernels.pointers import capsule_at, tensor_at

GPU = torch.device("cuda", 0)
UUID = "GPU-%08d-0000-0000-0000-000000000000"


class Processes:
    """Two processes of one host, each with a GPU of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.machine = monkeypatch, Machine()
        self.visible = [1]
        self.drivers = {number: FakeDriver(self.machine, number) for number in (1, 2)}
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.visible))
        monkeypatch.setattr(device_sharing, "tensor_at", lambda at, size, device: tensor_at(at, size, CPU))

    def properties(self, device: torch.device | int) -> SimpleNamespace:
        """Of a GPU as the process numbers it: its own one first."""
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(uuid=UUID % self.visible[index])

    def sharing(self, process: int, *others: int) -> CudaIpc:
        """Of the process with this number, whose GPU has it too. others: GPUs that it sees beside its own."""
        self.enter(process, *others)
        return CudaIpc(GPU)

    def enter(self, process: int, *others: int) -> None:
        """What is called now is called in this process."""
        self.visible = [process, *others]
        self._patch.setattr(device_sharing, "_driver", lambda: self.drivers[process])
        self._patch.setattr(os, "getpid", lambda: process)


CPU = torch.device("cpu")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_one_process_writes_what_another_reads(processes: Processes) -> None:
    mine = processes.sharing(1)
    exported = mine.export(BLOCK + 1)
    assert len(exported.name) == NAME_BYTES and exported.tensor.shape == (2 * BLOCK,)
    theirs = processes.sharing(2)
    opened = theirs.open(exported.name)
    exported.tensor[:8].view(torch.float32).copy_(torch.tensor([1.5, -2.0]))
    assert opened.tensor[:8].view(torch.float32).tolist() == [1.5, -2.0] and opened.name == b""
    opened.close()
    opened.close()
    exported.close()
    assert not processes.machine.memory and "cuIpcCloseMemHandle" in processes.drivers[2].calls
    for driver in processes.drivers.values():
        assert driver.calls.count("cuCtxPushCurrent") == driver.calls.count("cuCtxPopCurrent") > 1
        assert driver.calls.count("cuDevicePrimaryCtxRetain") == 1, "torch's context, and no other"


def test_the_driver_of_the_tests_notices_memory_that_is_freed_too_early(processes: Processes) -> None:
    exported = processes.sharing(1).export(1)
    processes.sharing(2).open(exported.name)
    with pytest.raises(AssertionError, match="freed while another process has it open"):
        exported.close()


def test_what_cannot_be_opened_is_refused(processes: Processes) -> None:
    exported = processes.sharing(1).export(1)
    with pytest.raises(ConfigError, match="cannot open memory that it exported itself"):
        processes.sharing(1).open(exported.name)
    theirs = processes.sharing(2)
    for damaged in (b"", exported.name[:-1], b"x" * NAME_BYTES):
        with pytest.raises(DamagedMessage, match="bytes do not name memory of a GPU"):
            theirs.open(damaged)
    magic, uuid, contents, size, process = _NAME.unpack(exported.name)
    with pytest.raises(DamagedMessage, match=f"memory of {size} bytes of a GPU is named as {size + 1} bytes"):
        theirs.open(_NAME.pack(magic, uuid, contents, size + 1, process))
    unknown = exported.name.replace(b"handle", b"HANDLE")
    with pytest.raises(ConfigError, match="cuIpcOpenMemHandle on GPU GPU-00000002.*: mapping of buffer"):
        theirs.open(unknown)


def test_gpus_without_peer_access_are_refused(processes: Processes) -> None:
    """Where the other GPU is visible. Otherwise the driver refuses."""
    exported = processes.sharing(1).export(1)
    theirs = processes.sharing(2, 1)
    theirs.open(exported.name).close()
    processes.machine.peers = False
    with pytest.raises(ConfigError, match="GPU-00000002.* and GPU-00000001.* have no peer access"):
        theirs.open(exported.name)


def test_a_gpu_without_room_is_one_clear_line(processes: Processes) -> None:
    mine = processes.sharing(1)
    processes.machine.free = BLOCK
    mine.export(1)
    with pytest.raises(ConfigError) as refused:
        mine.export(BLOCK + 1)
    assert str(refused.value) == f"--transport cuda_ipc: cuMemAlloc on GPU {UUID % 1}: out of memory"


def test_host_memory_is_read_in_place(processes: Processes) -> None:
    mine = processes.sharing(1)
    with mmap.mmap(-1, 4096) as pages:
        words = np.frombuffer(pages, np.uint8)
        mapped = mine.map_host(words)
        mapped.tensor[:8].view(torch.int64).fill_(7)
        assert words[:8].view(np.int64) == 7
        with pytest.raises(ConfigError, match="cuMemHostRegister"):
            mine.map_host(words)
        with pytest.raises(ValueError, match="not whole pages"):
            mine.map_host(words[:8])
        mapped.close()
        mine.map_host(words).close()
        del mapped, words


def test_missing_bindings_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sharing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        device_sharing.check_installed()
    assert str(refused.value) == (
        "--transport: got 'cuda_ipc'; allowed: auto, shm, socket "
        "(NVIDIA's cuda-bindings are not installed: pip install cuda-bindings)"
    )


def test_a_tensor_at_an_address_is_the_memory_there() -> None:
    memory = (ctypes.c_uint8 * 16)(*range(16))
    view = tensor_at(ctypes.addressof(memory), 16, CPU)[8:].view(torch.int64)
    memory[8] = 0
    assert view.tolist() == [int.from_bytes(bytes([0, *range(9, 16)]), "little")]


def test_a_capsule_names_the_gpu_that_it_is_made_for() -> None:
    """Numbers of `DLTensor` in DLPack's header: where the kind and the index of the device are."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = capsule_at(4096, 5, torch.device("cuda", 3))
    at = pointer(capsule, b"dltensor")
    kind, index = (ctypes.c_int32 * 2).from_address(at + 8)
    assert (ctypes.c_uint64.from_address(at).value, kind, index) == (4096, 2, 3)


@pytest.mark.skipif(
    device_sharing.importlib.util.find_spec("cuda") is None, reason="NVIDIA's cuda-bindings are not installed"
)
def test_nvidias_bindings_have_these_names() -> None:
    """The fake driver may not know functions that the real one lacks."""
    driver = device_sharing._driver()
    for name in dir(FakeDriver):
        assert not name.lower().startswith("cu") or hasattr(driver, name)
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), b"x" * 64, 64)
    assert ctypes.string_at(handle.getPtr(), 64) == b"x" * 64
