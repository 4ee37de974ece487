"""Times a model's operations beside the roofs of the machine.

The roofline model (Williams et al. 2009) bounds an operation by the time to read its data from memory and by
the time to compute its flops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.cost.ops import Work
from moesaic.hardware import operations, products
from moesaic.hardware.operations import Call, Sizes
from moesaic.hardware.read_test import ReadTest
from moesaic.hardware.timing import Show, Stopwatch
from moesaic.kernels.table import ROUNDING, Kernels

SIZE = 2048
"""Rows and columns of the matrices whose product gives the roof of computing, on a CPU."""
DEVICE_SIZE, DEVICE_BYTES = 8192, 1 << 30
"""The same on a GPU, and the bytes that are copied for the roof of its memory."""
RECORDED = 8
"""Calls of an operation in a recording. A GPU would otherwise wait for the host between its kernels."""


@dataclass(frozen=True)
class Roofs:
    """What the machine can do at most, measured without the engine's kernels."""

    bandwidth: float
    """Bytes/s that all threads read from memory, by libc's memcmp. Of a GPU: what a copy reads and
    writes."""
    flops: float
    """Flops/s of torch's product of two large matrices in the type that the kernels multiply in."""

    def best(self, other: Roofs) -> Roofs:
        """The higher roofs of two measurements. A shared machine is not always equally fast."""
        return Roofs(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))

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

    def share(self, roofs: Roofs) -> float:
        """Share of the roof that bounds the operation."""
        return roofs.seconds(self.call.work) / self.seconds


def roofs(kernels: Kernels, name: str, threads: int, stopwatch: Stopwatch) -> Roofs:
    """Measure the roofs with so many threads. name: of the kernels, as `--kernels`.

    Leaves the kernels with so many threads.
    """
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if name in ROUNDING else torch.float32
    left, right = (products.random((SIZE, SIZE), dtype, "cpu") for _ in range(2))
    flops = 2.0 * SIZE**3 / stopwatch.seconds(lambda: left @ right)
    kernels.set_threads(threads, False)
    return Roofs(1e9 * ReadTest(threads).gb_per_s(), flops)


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
    recording = kernels.recorder()(lambda: [call.run() for _ in range(RECORDED)])
    return stopwatch.seconds(recording.run) / RECORDED


@torch.inference_mode()
def measure(kernels: Kernels, sizes: Sizes, stopwatch: Stopwatch, show: Show) -> list[Speed]:
    """Time every operation with every number of rows."""
    found: list[Speed] = []
    total = len(sizes.rows) * (len(operations.names(sizes.model)) + len(sizes.types))
    for call in operations.every(kernels, sizes):
        show("kernels", len(found), total)
        found.append(Speed(call, _seconds(kernels, call, stopwatch)))
    show("kernels", total, total)
    return found
