"""Times a model's operations beside the roofs of the machine.

The roofline model (Williams et al. 2009) bounds an operation by the time to read its data from memory and by
the time to compute its flops. The roof of computing is what the instruction set can do at most: products of
numbers that stay in registers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moesaic.core.weight_types import is_integer
from moesaic.cost.ops import Work
from moesaic.kernels.table import BY_NAME, INTEGER, ROUNDING, SPLITTING, Kernels
from moesaic.planning.hardware import operations, products
from moesaic.planning.hardware.operations import Call, Sizes
from moesaic.planning.hardware.timing import Show, Stopwatch

SIZE = 2048
"""Rows and columns of the matrices whose product gives the roof of computing of the reference."""
ROUNDS = 1_000_000
"""Rounds of multiply-adds in registers of one timing: about a millisecond, with tiles twenty."""
DEVICE_SIZE, DEVICE_BYTES = 8192, 1 << 30
"""Rows and columns of the matrices for the roof of a GPU, and the bytes that are copied for its memory."""
CALLS_PER_RECORDING = 8
"""Calls of an operation in a recording. A GPU would otherwise wait for the host between its kernels."""
READ_BYTES = 1 << 30
"""Bytes that a test reads, far more than any cache holds."""
READS = 6


@dataclass(frozen=True)
class Roofs:
    """What the machine can do at most."""

    bandwidth: float
    """Bytes/s that all threads read from memory, by libc's memcmp. Of a GPU: what a copy reads and
    writes."""
    flops: float
    """Flops/s in float32: of multiply-adds in registers, or of torch's product of two large matrices."""
    own_flops: float | None = None
    """The same of the products that the instruction set has for some types (`has_own_products`). None: it has
    none."""

    def best(self, roofs: Roofs) -> Roofs:
        """The higher roofs of two measurements. A shared machine is not always equally fast."""
        own_flops = (
            None
            if self.own_flops is None or roofs.own_flops is None
            else max(self.own_flops, roofs.own_flops)
        )
        return Roofs(max(self.bandwidth, roofs.bandwidth), max(self.flops, roofs.flops), own_flops)

    def for_products(self, own_products: bool) -> Roofs:
        """The roofs of operations that are computed with the set's own products, or with float32's."""
        return replace(self, flops=self.own_flops) if own_products and self.own_flops is not None else self

    def seconds(self, work: Work) -> float:
        """The least seconds of an operation."""
        return max(work.bytes / self.bandwidth, work.flops / self.flops)

    def bound(self, work: Work) -> str:
        """ "memory" or "compute": what takes longer at least."""
        return "memory" if work.bytes / self.bandwidth > work.flops / self.flops else "compute"


@dataclass(frozen=True)
class Speed:
    """The measured speed of a `Call`."""

    call: Call
    seconds: float
    has_own_products: bool = False
    """Whether it was computed with the set's own products."""

    def share(self, roofs: Roofs) -> float:
        """Share of the roof that bounds the operation."""
        return roofs.for_products(self.has_own_products).seconds(self.call.work) / self.seconds

    def bound(self, roofs: Roofs) -> str:
        """ "memory" or "compute": what takes longer at least."""
        return roofs.for_products(self.has_own_products).bound(self.call.work)


def has_own_products(name: str, call: Call) -> bool:
    """Whether the instruction set `name` has products of its own for an operation's weights or cache: of rows
    that are rounded to int8 or bf16, or split into numbers of bf16."""
    if name in INTEGER:
        return call.operation != "attention" and is_integer(call.stored_type)
    sets = ROUNDING if call.operation == "attention" else ROUNDING | SPLITTING
    return name in sets and call.stored_type == "bfloat16"


def roofs(kernels: Kernels, name: str, threads: int, stopwatch: Stopwatch) -> Roofs:
    """Measure the roofs with so many threads. name: of the kernels, as `--kernels`.

    Leaves the kernels with so many threads.
    """
    torch.set_num_threads(threads)
    kernels.set_threads(threads, False)
    own_flops = None
    if kernels.peak is None:
        left, right = (products.random((SIZE, SIZE), torch.float32, "cpu") for _ in range(2))
        flops = 2.0 * SIZE**3 / stopwatch.seconds(lambda: left @ right)
    else:
        flops = _peak(kernels.peak, True, stopwatch)
        own_flops = _peak(kernels.peak, False, stopwatch) if name in BY_NAME else None
    return Roofs(1e9 * ReadTest(threads).gb_per_s(), flops, own_flops)


def _peak(peak: Callable[[int, bool], int], floats: bool, stopwatch: Stopwatch) -> float:
    """Flops/s of multiply-adds in registers, two flops each."""
    products = peak(1, floats) * ROUNDS
    return 2.0 * products / stopwatch.seconds(lambda: peak(ROUNDS, floats))


def device_roofs(stopwatch: Stopwatch, device: str) -> Roofs:
    """The roofs of a GPU: a product of large matrices in bfloat16, and a copy within its memory."""
    size = DEVICE_SIZE
    left, right = (products.random((size, size), torch.bfloat16, device) for _ in range(2))
    flops = 2.0 * size**3 / stopwatch.seconds(lambda: left @ right)
    source, target = (torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return Roofs(2.0 * DEVICE_BYTES / stopwatch.seconds(lambda: target.copy_(source)), flops)


def _seconds(kernels: Kernels, call: Call, stopwatch: Stopwatch) -> float:
    """Seconds of one call. On a GPU several calls are recorded, where its kernels can be."""
    if kernels.recorder is None or kernels.name != "triton":
        return stopwatch.seconds(call.run)
    call.run()  # what is compiled on first use
    recording = kernels.recorder()(lambda: [call.run() for _ in range(CALLS_PER_RECORDING)])
    return stopwatch.seconds(recording.run) / CALLS_PER_RECORDING


@torch.inference_mode()
def measure(kernels: Kernels, name: str, sizes: Sizes, stopwatch: Stopwatch, show: Show) -> list[Speed]:
    """Time every operation with every number of rows. name: as of `roofs`."""
    speeds: list[Speed] = []
    total = len(sizes.rows) * (len(operations.operation_names(sizes.model)) + len(sizes.types))
    for call in operations.list_calls(kernels, sizes):
        show("kernels", len(speeds), total)
        speeds.append(Speed(call, _seconds(kernels, call, stopwatch), has_own_products(name, call)))
    show("kernels", total, total)
    return speeds


class ReadTest:
    """Measures how fast a machine's memory can be read at all, without the engine's kernels.

    Several threads read it with libc's memcmp, which does nothing else. Each compares two parts: a core reads
    two streams faster than one.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._length = threads, READ_BYTES // (2 * threads)
        self._memory = b"\1" * READ_BYTES
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def gb_per_s(self) -> float:
        """The best of some reads: what the machine has to give in this second."""
        return max(READ_BYTES / self._read() / 1e9 for _ in range(READS))

    def _read(self) -> float:
        """Seconds that one pass over the memory takes."""
        start = ctypes.cast(ctypes.c_char_p(self._memory), ctypes.c_void_p).value or 0
        parts = [start + part * self._length for part in range(2 * self._threads)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        threads = [threading.Thread(target=self._memcmp, args=(*pair, self._length)) for pair in pairs]
        start_time = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_time
