"""Describes a machine by measurements: GPU memory over RAM, or RAM over a disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.core.stored import COMPRESSED, QUANTIZED
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.gpu import hardware as cuda
from moesaic.gpu.hardware import Copy, Device
from moesaic.kernels.table import Kernels, pick
from moesaic.planning.hardware import disk, memory, products
from moesaic.planning.hardware.disk import Disk
from moesaic.planning.hardware.memory import Reading
from moesaic.planning.hardware.products import Rate, name_of
from moesaic.planning.hardware.timing import Clock, Show, Stopwatch
from moesaic.runtime.machine import available_memory, cores

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of weights that are measured. A plan uses the first one that the kernels store as it is.

bf16 comes first, since checkpoints are bf16.
"""


@dataclass(frozen=True)
class Converting:
    """The conversion of one expert that a checkpoint has otherwise than the kernels read it."""

    name: str
    """See ModelSizes.conversion."""
    size: int
    """Bytes of the files that are converted."""
    run: Callable[[], object]
    """Converts them once."""


@dataclass(frozen=True)
class Effort:
    """How long to measure, and how much data at a time."""

    seconds: float = 0.5
    """Seconds for each figure."""
    read: int = 512 << 20
    """Minimum number of bytes of memory that are read."""
    copied: int = 256 << 20
    """Bytes of one copy to or from a GPU."""
    disk: disk.Sizes = field(default_factory=disk.Sizes)
    products: products.Sizes = field(default_factory=products.Sizes)
    converting: Converting | None = None
    """None: no expert is converted."""


FULL = Effort()
"""An effort of well under a minute."""
SHORT = Effort(
    seconds=0.15,
    read=256 << 20,
    disk=disk.Sizes(file=256 << 20, blocks=(1 << 20, 8 << 20)),
    products=products.Sizes(matrices=16, rows=(1, 4, 16, 512), most_rows=1024),
)
"""An effort of about ten seconds."""


@dataclass(frozen=True)
class Processing:
    """Measurements of a memory and of the processor that computes on it."""

    name: str
    kernels: str
    memory: int
    """Free bytes of the memory."""
    readings: tuple[Reading, ...]
    rates: tuple[Rate, ...]

    @property
    def dtype(self) -> str:
        """Dtype of the weights for which `level` describes the speed."""
        return self.readings[0].dtype

    def level(self, usable: float = 0.9) -> Level:
        """The memory level, for weights of `dtype`.

        It has the bandwidth with all threads, the peak flops/s, and the share of the peak in long products.
        """
        bandwidth = [one.bandwidth for one in self.readings if one.dtype == self.dtype][-1]
        efficiency = products.prefill_efficiency(self.rates, self.dtype)
        overlap = products.overlap(self.rates, self.dtype, bandwidth)
        experts = products.by_rows(self.rates, self.dtype)
        kinds = sorted({one.dtype for one in self.rates} & QUANTIZED.keys())
        packed = tuple((kind, products.by_rows(self.rates, kind)) for kind in kinds)
        peak = products.peak(self.rates, self.dtype)
        processor = Processor(peak, efficiency, overlap=overlap, experts=experts, packed=packed)
        return Level(self.name, self.memory, bandwidth, processor, usable)


@dataclass(frozen=True)
class Measuring:
    """Measures a machine."""

    effort: Effort
    show: Show
    threads: int | None = None
    """Number of compute threads. None: one for each core."""
    clock: Clock = time.perf_counter

    def ram_over_disk(self, path: Path, name: str) -> Hardware:
        """Measure RAM with the CPU as fast level, and the disk of `path`, which computes nothing, as slow
        level.

        Raises ConfigError if the disk cannot be measured.
        """
        begun = self.clock()
        found = disk.measure(path, self.effort.disk, self.effort.seconds, self.clock, self.show)
        processing = self._cpu()
        slow = Level("disk", found.memory, found.bandwidth, None)
        up = found.bandwidth if found.write is None else found.write
        link = Link(found.bandwidth, up, conversions=self._conversions())
        hardware = Hardware(name, processing.level(), slow, link)
        return self._described(hardware, begun, processing, {**_processing("", processing), **_disk(found)})

    def gpu_over_ram(self, device: Device, name: str) -> Hardware:
        """Measure the device's memory as fast level.

        The slow level is RAM with the CPU, reached through pinned memory.
        """
        begun = self.clock()
        cpu, gpu = self._cpu(), self._device(device)
        moved = cuda.copies(device, self.effort.copied, self._watch(device), self.show)
        device.release()
        speed = {one.way: one.bandwidth for one in moved if one.pinned}
        link = Link(speed["down"], speed["up"], speed["staging"])
        hardware = Hardware(name, gpu.level(), cpu.level(0.8), link)
        found = {**_processing("fast_", gpu), **_processing("slow_", cpu), "link": _copies(moved)}
        return self._described(hardware, begun, gpu, found)

    def _conversions(self) -> tuple[tuple[str, float], ...]:
        """See `Link.conversions`."""
        one = self.effort.converting
        if one is None:
            return ()
        self.show("conversion", 0, 1)
        rate = one.size / self._watch().seconds(one.run)
        self.show("conversion", 1, 1)
        return ((one.name, rate),)

    def _cpu(self) -> Processing:
        kernels, threads, free = pick("cpu", "auto"), self.threads or cores(), available_memory()
        dtypes, watch = _stored_dtypes(kernels), self._watch()
        size = memory.enough(self.effort.read, free)
        ways = [(dtype, count) for dtype in dtypes for count in dict.fromkeys((1, threads))]
        readings: list[Reading] = []
        for dtype, count in ways:
            self.show("memory", len(readings), len(ways))
            kernels.set_threads(count, False)
            readings.append(Reading(count, name_of(dtype), memory.read(kernels, dtype, size, watch)))
        self.show("memory", len(ways), len(ways))
        kernels.set_threads(threads, False)
        beyond = memory.beyond_caches(free)
        rates = products.rates(kernels, dtypes, self.effort.products, watch, self.show, beyond=beyond)
        name = f"RAM, {threads} thread{'s' if threads > 1 else ''}"
        return Processing(name, kernels.name, free, tuple(readings), rates)

    def _device(self, device: Device) -> Processing:
        kernels, watch, free = pick("cuda", "auto"), self._watch(device), device.free()
        size = min(self.effort.read, free // 8)
        readings = tuple(
            Reading(1, name_of(dtype), memory.read(kernels, dtype, size, watch, device.name))
            for dtype in DTYPES
        )
        rates = products.rates(kernels, DTYPES, self.effort.products, watch, self.show, device.name)
        return Processing(device.title, kernels.name, free, readings, rates)

    def _watch(self, device: Device | None = None) -> Stopwatch:
        watch = Stopwatch(self.effort.seconds, self.clock)
        return watch if device is None else replace(watch, wait=device.wait)

    def _described(
        self, hardware: Hardware, begun: float, fast: Processing, found: dict[str, Any]
    ) -> Hardware:
        took = self.clock() - begun
        source = f"measured in {took:.0f} s by microbenchmarks: {fast.kernels}, weights in {fast.dtype}"
        sizes = self.effort.products
        form = "" if sizes.packed is None else f", also {sizes.packed}"
        form = ", compressed where bf16" if sizes.packed == COMPRESSED else form
        figures = {"seconds": round(took, 1), "experts": f"{sizes.hidden} x {sizes.width}{form}"}
        return replace(hardware, source=source, measured={**figures, **found})


def _stored_dtypes(kernels: Kernels) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in kernels.unconverted_dtypes]


def _processing(prefix: str, found: Processing) -> dict[str, Any]:
    """The figures for the hardware file, in GiB/s and Gflops/s."""
    return {
        f"{prefix}memory": [
            {"threads": one.threads, "dtype": one.dtype, "gib": one.bandwidth / GIB} for one in found.readings
        ],
        f"{prefix}products": [
            {"shape": one.shape, "dtype": one.dtype, "rows": one.rows, "gflops": one.flops / 1e9}
            for one in found.rates
        ],
    }


def _disk(found: Disk) -> dict[str, Any]:
    figures: dict[str, Any] = {"file": found.file, "direct": found.direct}
    figures["disk"] = [
        {
            "repeated": one.repeated,
            "block_kib": one.block // 1024,
            "readers": one.readers,
            "gib": one.bandwidth / GIB,
        }
        for one in found.reads
    ]
    return figures if found.write is None else {**figures, "write_gib": found.write / GIB}


def _copies(found: Sequence[Copy]) -> list[dict[str, Any]]:
    return [{"way": one.way, "pinned": one.pinned, "gib": one.bandwidth / GIB} for one in found]
