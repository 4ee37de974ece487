"""Memory that GPUs of several hosts write into: the order of NVSHMEM's calls, on a library that is none.

Processes are objects here. Real ones write into each other's memory in
`tests/gpu/test_nvshmem_stand_in.py`, by a stand-in.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.fake_nvshmem import (
    ID_BYTES,
    STREAM,
    Bindings,
    CmpType,
    Core,
    Device,
    FakeNvshmem,
    InitStatus,
    Network,
    SignalOp,
)

from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.nvshmem.symmetric_heap import Nvshmem, SymmetricHeap
from moesaic.kernels.pointers import tensor_at

GPU, CPU = torch.device("cuda", 1), torch.device("cpu")
SIZE = 256


class Processes:
    """Each has the library for itself, and the second GPU that it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.network = monkeypatch, Network()
        self.waits = 0
        """How often a process waited for its stream."""
        stream = SimpleNamespace(cuda_stream=STREAM, synchronize=self._wait)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(symmetric_heap, "check_installed", lambda: None)
        monkeypatch.setattr(symmetric_heap, "tensor_at", lambda at, size, device: tensor_at(at, size, CPU))
        monkeypatch.setattr(Device, "current", None)

    def start(self) -> tuple[FakeNvshmem, Nvshmem]:
        """Another process. What is imported from now on is what it imports."""
        library = FakeNvshmem(self.network)
        for name, module in library.modules.items():
            self._patch.setitem(sys.modules, name, module)
        symmetric_heap.bindings.cache_clear()
        return library, Nvshmem(GPU)

    def job(self, size: int = SIZE) -> tuple[list[FakeNvshmem], list[SymmetricHeap]]:
        """A job of two processes."""
        libraries, jobs = zip(*[self.start() for _ in range(2)], strict=True)
        name = jobs[0].unique_id()
        return list(libraries), [one.join(name, pe, 2, size) for pe, one in enumerate(jobs)]

    def _wait(self) -> None:
        self.waits += 1


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


@pytest.fixture(autouse=True)
def _forget() -> object:
    yield
    symmetric_heap.bindings.cache_clear()


def test_a_process_writes_into_the_memory_of_another(processes: Processes) -> None:
    libraries, heaps = processes.job()
    assert [heap.pe for heap in heaps] == [0, 1] and processes.waits == 2 and Device.current == 1
    assert heaps[0].tensor.tolist() == heaps[1].tensor.tolist() == [0] * SIZE
    heaps[0].tensor[16:20] = torch.tensor([1, 2, 3, 4])
    heaps[0].put(32, 16, 3, 64, 9, 1)
    assert heaps[1].tensor.tolist() == [0] * 32 + [1, 2, 3] + [0] * 29 + [9] + [0] * 191
    heaps[1].await_signal(64, 9)
    with pytest.raises(AssertionError, match="wait for ever"):
        heaps[1].await_signal(64, 10)
    assert libraries[0].calls[-1] == "putmem_signal_on_stream"


def test_a_signal_alone_is_no_put(processes: Processes) -> None:
    """To send 0 bytes is not safe on every network."""
    libraries, heaps = processes.job()
    heaps[1].put(0, 0, 0, 8, 5, 0)
    assert heaps[0].tensor[8:16].tolist() == [5] + [0] * 7
    assert libraries[1].calls[-1] == "signal_op_on_stream"


def test_nobody_writes_before_all_memory_is_zeros(processes: Processes) -> None:
    """The fake library notices it."""
    _, first = processes.start()
    heap = first.join(first.unique_id(), 0, 2, SIZE)
    with pytest.raises(AssertionError, match="writes before all memory is zeros"):
        heap.put(0, 0, 8, 8, 1, 1)


def test_what_cannot_join_is_one_clear_line(processes: Processes) -> None:
    _, jobs = processes.start()
    with pytest.raises(ConfigError, match=f"^--transport nvshmem: a name of 3 bytes; .* have {ID_BYTES}$"):
        jobs.join(b"abc", 0, 1, SIZE)
    with pytest.raises(ConfigError) as refused:
        jobs.join(b"x" * ID_BYTES, 1, 2, SIZE)
    assert str(refused.value) == (
        "--transport nvshmem: PE 1 of 2 cannot join; NVSHMEM_DEBUG=WARN says more: Status code 7"
    )
    with pytest.raises(ConfigError, match="this process has joined a job before$"):
        jobs.join(jobs.unique_id(), 0, 1, SIZE)


def test_a_process_joins_once(processes: Processes) -> None:
    _, jobs = processes.start()
    jobs.join(jobs.unique_id(), 0, 1, SIZE)
    with pytest.raises(ConfigError, match="this process has joined a job before$"):
        jobs.join(jobs.unique_id(), 0, 1, SIZE)


def test_a_gpu_without_room_is_one_clear_line(processes: Processes) -> None:
    processes.network.free = SIZE
    processes.job()
    with pytest.raises(ConfigError, match="^--transport nvshmem: no 257 bytes for the symmetric heap; "):
        processes.job(SIZE + 1)


def test_processes_that_share_a_gpu_are_refused(processes: Processes) -> None:
    """Streams of such a job cannot wait for words."""
    processes.network.share_gpus = True
    with pytest.raises(ConfigError, match="two processes of the job have the same GPU; each needs its own$"):
        processes.job()


def test_a_library_that_does_not_load_is_one_clear_line(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _ = processes.start()

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvshmem_host.so.3": No such file\n  listdir("/lib")')

    monkeypatch.setattr(library.modules["nvshmem.core"], "get_version", fail)
    symmetric_heap.bindings.cache_clear()
    with pytest.raises(ConfigError) as refused:
        symmetric_heap.jobs(GPU)
    assert str(refused.value) == (
        "--transport nvshmem: NVIDIA's library does not load: "
        'Failure finding "libnvshmem_host.so.3": No such file'
    )


def test_missing_bindings_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    symmetric_heap.bindings.cache_clear()
    with pytest.raises(ConfigError, match=r"^--transport: got 'nvshmem'; .*pip install nvshmem4py-cu12"):
        symmetric_heap.jobs(GPU)


# ---- kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpu.triton.nvshmem`, which has launched nothing yet."""
    pytest.importorskip("triton")
    module = importlib.import_module("moesaic.gpu.triton.nvshmem")
    monkeypatch.setattr(module, "_known_kernels", set())
    module._library.cache_clear()
    return module


def test_kernels_and_host_mean_the_same_by_a_number(kernels: Any) -> None:
    """The last test compares these numbers with NVIDIA's own, where they are installed."""
    assert (kernels._SET.value, kernels._AT_LEAST.value) == (SignalOp.SIGNAL_SET, CmpType.CMP_GE)


@pytest.mark.parametrize(("gpu", "found"), [((8, 0), 80), ((8, 6), 80), ((9, 0), 90), ((12, 0), 100)])
def test_a_gpu_gets_the_best_library_that_there_is(
    processes: Processes, kernels: Any, monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int], found: int
) -> None:
    processes.start()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    assert kernels._library() == f"libnvshmem_device_sm_{found}.bc"


def test_a_gpu_without_a_library_is_one_clear_line(
    processes: Processes, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.network.built = ("100",)
    processes.start()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigError, match="has no library for kernels of compute capability 90$"):
        kernels._library()


class _Kernel:
    """One that Triton compiles and loads."""

    hash, module = "its hash", 0

    def run(self, *arguments: object, grid: object, warmup: bool) -> _Kernel:
        assert warmup
        return self

    def _init_handles(self) -> None:
        self.module = 5


def test_nvshmem_knows_a_kernel_once_it_is_loaded(processes: Processes, kernels: Any) -> None:
    library, jobs = processes.start()
    kernel, given = _Kernel(), (torch.zeros(1),)
    with pytest.raises(ConfigError, match="a kernel is refused with status code 7$"):
        kernels._make_known(kernel, (1,), given, {})
    jobs.join(jobs.unique_id(), 0, 1, SIZE)
    for _ in range(2):
        kernels._make_known(kernel, (1,), given, {})
    assert library.calls.count("cumodule_init") == 2, "once refused, once accepted"


# ---- what is installed


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed")
def test_nvidias_bindings_have_these_names() -> None:
    """The fake library may not know what the real one lacks. A name needs no GPU."""
    library = symmetric_heap.bindings()
    for name in dir(Bindings):
        assert name.startswith("_") or hasattr(library, name)
    for name, kind in (("Init_status", InitStatus), ("Signal_op", SignalOp), ("Cmp_type", CmpType)):
        real = getattr(library, name)
        assert {one.name: int(real[one.name]) for one in kind} == {one.name: int(one) for one in kind}
    assert library.init_status() == InitStatus.STATUS_NOT_INITIALIZED
    core = importlib.import_module("nvshmem.core")
    for name in dir(Core):
        assert name.startswith("_") or hasattr(core, name)
    assert symmetric_heap._size(core.get_unique_id(empty=True)) == ID_BYTES
    assert len(Nvshmem(GPU).unique_id()) == ID_BYTES
