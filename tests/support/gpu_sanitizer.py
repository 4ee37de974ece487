"""A CUDA device that is none: torch code that is meant for a GPU runs here on machines without one.

Tensors of class `OnDevice` say that they are on cuda:0. Their numbers lie in an ordinary CPU tensor, which
nothing but this file gets at. Every operation of torch comes by here (`torch.utils._python_dispatch`), is
refused where CUDA would refuse it, and is carried out on the CPU tensors: the arithmetic, to the last bit, is
that of a CPU. What is refused, each with torch's own kind of error:

- tensors of two devices in one operation, but for copies, CPU tensors without dimensions among elementwise
  operands, and CPU indices into a tensor of the device;
- numpy arrays of the device's memory;
- products of integers.

Fresh memory of the device holds what an allocator may leave there: NaN, and integers that index nothing. A
copy to or from the device is always one: nothing that is written to the one side later shows on the other. A
copy that nobody waits for is done as late as a GPU may do it: when the thread that asked for it waits for its
stream, or has the device do something else. Each thread has one stream; pinned memory is a CPU tensor.
`test_sanitizer.py` compares these rules with torch's own model of a GPU, `test_cuda.py` with a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
NAME = "a GPU that is none"
GIB = 1 << 30
ADDRESSES = 1 << 62
"""Added to a CPU address it is nobody's: who reads there is stopped by the processor."""
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META, _TYPES = 1, 14, 20
"""Places in c10's registry of device guards, as `c10/core/DeviceType.h` numbers them."""

COPIES = {"copy_", "_to_copy", "to", "copy"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
SCALARS = {"floor_divide", "floor_divide_", "masked_fill", "masked_fill_", "fill_", "__and__", "__or__"}
"""Elementwise operations that torch does not tag as such."""
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "einsum"}
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result the host waits for."""
VIEWS = {"slice", "select", "view", "unsqueeze", "alias", "detach", "lift_fresh"}
"""Operations that look at the same memory, so the device has nothing to do."""
FRESH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


Operands = list[tuple[str, torch.Tensor]]
"""Tensors, and the arguments that they came as."""


class Taken:
    """Bytes of the device that tensors look at, and the most since `begin`."""

    def __init__(self) -> None:
        self._lock, self._looking = threading.RLock(), Counter[int]()
        self.now = self.most = 0
        self.tell: Callable[[int, int], None] = lambda storage, size: None
        """Hears of each storage that is taken, and with a negative size of one that is given back."""

    def begin(self) -> int:
        """Returns what is taken now."""
        self.most = self.now
        return self.now

    def looked_at(self, numbers: torch.Tensor) -> bool:
        """Whether a tensor of the device looks at this memory."""
        return self._looking[numbers.untyped_storage()._cdata] > 0

    def add(self, storage: int, size: int, one: int) -> None:
        """A tensor more that looks at this memory, or one less. Several may."""
        with self._lock:
            before = self._looking[storage]
            self._looking[storage] += one
            if not before or not self._looking[storage]:
                self.now += one * size
                self.tell(storage, one * size)
            self.most = max(self.most, self.now)


TAKEN = Taken()


class _Names(threading.local):
    def __init__(self) -> None:
        self.of: list[str] = []


class Waits:
    """Counts where the host waits for the device: what is read back, and copies that are not from or to
    pinned memory or do not say `non_blocking`."""

    def __init__(self) -> None:
        self.of: list[str] = []
        self.mine = _Names()
        """Those of the calling thread."""
        self.pinned: dict[int, torch.Tensor] = {}
        """By the address of the memory, which lives on here. So nothing else gets the address."""

    def add(self, name: str) -> None:
        self.of.append(name)
        self.mine.of.append(name)

    def pin(self, here: torch.Tensor) -> None:
        self.pinned[here.untyped_storage().data_ptr()] = here

    def see(self, name: str, given: Mapping[str, Any], operands: Operands, device: torch.device) -> None:
        """One operation on tensors of the device."""
        there = [one for _, one in operands if isinstance(one, OnDevice)]
        here = [one for _, one in operands if not isinstance(one, OnDevice)]
        if name in READS or any(
            one.dtype is torch.bool for key, one in operands if key == "indices" and there
        ):
            self.add(name)
        elif name in COPIES and ((there and (here or device == CPU)) or (here and device == DEVICE)):
            addresses = {one.untyped_storage().data_ptr() for one in here}
            if not given.get("non_blocking") or not addresses <= self.pinned.keys():
                self.add(name)
        elif (
            name in INDEXING
            and there
            and any(key == "indices" and one.dim() for key, one in operands if not isinstance(one, OnDevice))
        ):
            self.add(name)


WAITS = Waits()


class Look:
    """At memory of the device, for as long as this lives: a tensor of the device has one."""

    __slots__ = ("_size", "_storage")

    def __init__(self, numbers: torch.Tensor) -> None:
        storage = numbers.untyped_storage()
        self._storage, self._size = storage._cdata, storage.nbytes()
        TAKEN.add(self._storage, self._size, 1)

    def __del__(self) -> None:
        TAKEN.add(self._storage, self._size, -1)


class OnDevice(torch.Tensor):
    """Says that it is on the device; `numbers` has the same sizes and strides."""

    numbers: torch.Tensor
    look: Look

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> OnDevice:
        inference = numbers.is_inference()
        if inference is torch.is_inference_mode_enabled():
            made = OnDevice._wrapper(numbers)
        else:
            with torch.inference_mode(inference):  # an inference tensor where that is one
                made = OnDevice._wrapper(numbers)
        made.numbers = numbers
        made.look = Look(numbers)
        return made

    @staticmethod
    def _wrapper(numbers: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            OnDevice, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=DEVICE,
        )  # fmt: skip
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return carry_out(func, args, kwargs or {})

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def tolist(self) -> Any:
        WAITS.add("tolist")
        return self.numbers.tolist()

    def record_stream(self, stream: object) -> None:
        """Memory is given back when nothing looks at it any more, whoever it is."""

    def data_ptr(self) -> int:
        return ADDRESSES + self.numbers.data_ptr()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"OnDevice({self.numbers!r})"


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees also the operations that make tensors of the device from nothing, or from those of the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, as nothing is compiled here: the wrapper that skips it would take a tenth of the time."""
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carry_out(func, args, kwargs or {})


class Running(threading.Thread):
    """Work of the device beside the thread that asked for it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="a GPU's work", daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with torch.inference_mode():
                self._work()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Wait for it. Raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error


class Stream(threading.local):
    """What the calling thread told the device and has not been done yet."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.running: Running | None = None
        """What the device does beside this thread, before what waits."""
        self.capture: Callable[[OpOverload, dict[str, Any], Operands, torch.device], Any] | None = None
        """Who takes operations that are not to be done now; see `gpu_graphs`."""

    def synchronize(self) -> None:
        WAITS.add("synchronize")
        self.drain()

    @property
    def done(self) -> bool:
        """Whether everything is done. Does not wait for what runs beside this thread."""
        if self.running is not None and self.running.is_alive():
            return False
        self.drain()
        return True

    def drain(self) -> None:
        """Do it, as the device does when nobody waits for it."""
        running, self.running = self.running, None
        if running is not None:
            running.end()
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            one()


STREAM = Stream()


class Event:
    """Of the calling thread's stream."""

    def __init__(self, blocking: bool = False) -> None:
        """blocking: who waits sleeps."""
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        if self._stream is not None and (self._stream.waiting or self._stream.running):
            self._stream.synchronize()

    def query(self) -> bool:
        return self._stream is None or self._stream.done


@contextmanager
def sanitized(free: int = 64 * GIB, devices: int = 1) -> Iterator[None]:
    """Within it torch has so many CUDA devices, of which this many bytes are free. Tensors are on the first
    one, since a process of ours sees no other. For the calling thread, and for others that take a stream of
    their own."""
    there: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: NAME,
        "mem_get_info": lambda device=None: (free, 2 * free),
        "current_stream": lambda device=None: STREAM,
        "Stream": lambda device=None: STREAM,
        "Event": Event,
        "stream": lambda stream: Dispatch(),  # type: ignore[no-untyped-call]
    }
    with guarded(), mock.patch.multiple(torch.cuda, **there), Dispatch():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def in_thread() -> Iterator[None]:
    """Within it another thread than that of `sanitized` has the devices too, until `sanitized` ends."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # a setting of each thread
    try:
        with Dispatch():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def guarded() -> Iterator[None]:
    """Within it torch's own code may name a CUDA device where there is none.

    Its device guards look up who changes the current device, and a CPU build has nobody for CUDA: the one of
    the meta device, who does nothing, takes the place.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _TYPES).in_dll(library, _REGISTRY)
    before, lifting = registry[_CUDA], torch._C._only_lift_cpu_tensors()
    registry[_CUDA] = registry[_META]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes it here and moves it
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifting)
        registry[_CUDA] = before


@dataclass(frozen=True)
class Operation:
    """What one of torch's operations says of itself."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    """Arguments that it writes to."""
    takes_scalars: bool
    """Scalars of the CPU may be among its operands."""

    @classmethod
    @functools.cache
    def of(cls, func: OpOverload) -> Operation:
        arguments, name = func._schema.arguments, func._schema.name.partition("::")[2]
        written = frozenset(one.name for one in arguments if one.alias_info and one.alias_info.is_write)
        if name in INDEXING:
            written |= {"self"}
        scalars = torch.Tag.pointwise in func.tags or name in SCALARS | INDEXING
        return cls(name, tuple(one.name for one in arguments), written, scalars)


def carry_out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation: checked, done on the CPU, its results where a GPU would have them."""
    operation = Operation.of(func)
    given = dict(zip(operation.arguments, args, strict=False)) | kwargs
    operands, plain = _operands(given)
    owners = {id(one.numbers): one for _, one in operands if isinstance(one, OnDevice)}
    if owners:
        check(operation, operands)
    device = _result_device(operation.name, given, bool(owners))
    WAITS.see(operation.name, given, operands, device)
    if STREAM.capture is not None:
        return STREAM.capture(func, given, operands, device)
    if operation.name == "copy_" and given.get("non_blocking") and len(owners) == 1:
        STREAM.waiting.append(functools.partial(func, **plain))
        return given["self"]
    if owners and not _views(operation.name, given, device):
        STREAM.drain()
    if given.get("device") is not None:
        plain["device"] = CPU
    if given.get("pin_memory"):
        plain["pin_memory"] = False
    if operation.name == "to" and device != given["self"].device:
        plain["copy"] = True
    result = func(**plain)
    if operation.name in FRESH and device == DEVICE:
        spoil(result)
    if given.get("pin_memory"):
        WAITS.pin(result)
    if device == CPU and not owners:
        return result

    def labelled(one: torch.Tensor) -> torch.Tensor:
        """In-place operations return who they were asked of."""
        return owners[id(one)] if id(one) in owners else OnDevice(one) if device == DEVICE else one

    return mapped(result, labelled)


def _views(name: str, given: Mapping[str, Any], device: torch.device) -> bool:
    """Whether the device has nothing to do."""
    if name != "to":
        return name in VIEWS
    before = given["self"]
    same = device == before.device and given.get("dtype") in (None, before.dtype)
    return same and not given.get("copy")


def check(operation: Operation, operands: Operands) -> None:
    """Raises RuntimeError where CUDA would. At least one operand is on the device."""
    there = [one for _, one in operands if isinstance(one, OnDevice)]
    if len(there) < len(operands) and operation.name not in COPIES:
        indexing = operation.name in INDEXING
        here = [
            (key, one)
            for key, one in operands
            if not isinstance(one, OnDevice) and not (indexing and key == "indices")
        ]
        if any(one.dim() or key in operation.written or not operation.takes_scalars for key, one in here):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and cpu! (when checking {operation.name})"
            )
    if operation.name in PRODUCTS and not there[0].is_floating_point():
        raise RuntimeError(f'"addmm_cuda" not implemented for {there[0].dtype}')


def _result_device(name: str, given: Mapping[str, Any], there: bool) -> torch.device:
    """Where the results are: where it is said, else where the operands are. there: one is on the device."""
    if given.get("device") is not None:
        return CPU if torch.device(given["device"]).type == "cpu" else DEVICE
    if name == "to" and "other" in given:
        return given["other"].device  # type: ignore[no-any-return]
    if name in COPIES or name in INDEXING:
        return given["self"].device  # type: ignore[no-any-return]
    return DEVICE if there else CPU


def spoil(fresh: torch.Tensor) -> None:
    if fresh.is_floating_point():
        fresh.fill_(torch.nan)
    elif fresh.dtype is not torch.bool:
        fresh.fill_(torch.iinfo(fresh.dtype).max)


def _operands(given: Mapping[str, Any]) -> tuple[Operands, dict[str, Any]]:
    """The tensors among the arguments, and the arguments with tensors of the CPU in place of the device's."""
    operands: Operands = []
    plain = dict(given)
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            operands.append((key, value))
            plain[key] = numbers_of(value)
        elif isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
            operands += [(key, one) for one in value if isinstance(one, torch.Tensor)]
            plain[key] = mapped(value, numbers_of)
    return operands, plain


def numbers_of(one: torch.Tensor) -> torch.Tensor:
    return one.numbers if isinstance(one, OnDevice) else one


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(one, change) for one in value])
    return value
