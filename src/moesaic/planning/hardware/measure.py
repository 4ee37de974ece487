"""Describes a machine by measurements: GPU memory over RAM, or RAM over a disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.core import gpu_parts
from moesaic.core.weight_types import COMPRESSED_DTYPE, is_quantized, split_dtype
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.kernels.table import Kernels, pick
from moesaic.planning.hardware import disk, memory, products
from moesaic.planning.hardware.device import Copy, Device
from moesaic.planning.hardware.disk import Disk
from moesaic.planning.hardware.memory import Reading
from moesaic.planning.hardware.products import Rate, dtype_name
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
    """Name of the conversion, as in `ModelSizes.conversion`."""
    size: int
    """Bytes of the files that are converted."""
    run: Callable[[], object]
    """Converts them once."""


@dataclass(frozen=True)
class Effort:
    """How long to measure, and how much data at a time."""

    seconds: float = 0.5
    """Seconds for each figure."""
    read_bytes: int = 512 << 20
    """Minimum number of bytes of memory that are read."""
    copy_bytes: int = 256 << 20
    """Bytes of one copy to or from a GPU."""
    disk: disk.Sizes = field(default_factory=disk.Sizes)
    products: products.Sizes = field(default_factory=products.Sizes)
    converting: Converting | None = None
    """None: no expert is converted."""


FULL = Effort()
"""An effort of well under a minute."""
SHORT = Effort(
    seconds=0.15,
    read_bytes=256 << 20,
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
        bandwidth = [
            measurement.bandwidth for measurement in self.readings if measurement.dtype == self.dtype
        ][-1]
        efficiency = products.prefill_efficiency(self.rates, self.dtype)
        overlap = products.compute_overlap(self.rates, self.dtype, bandwidth)
        experts = products.flops_by_rows(self.rates, self.dtype)
        types = {measurement.dtype for measurement in self.rates}
        kinds = sorted(dtype for dtype in types if all(map(is_quantized, split_dtype(dtype))))
        packed_curves = tuple((kind, products.flops_by_rows(self.rates, kind)) for kind in kinds)
        peak = products.find_peak(self.rates, self.dtype)
        processor = Processor(peak, efficiency, overlap=overlap, experts=experts, packed_rates=packed_curves)
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
        start = self.clock()
        disk_speed = disk.measure(path, self.effort.disk, self.effort.seconds, self.clock, self.show)
        processing = self._cpu()
        slow = Level("disk", disk_speed.memory, disk_speed.bandwidth, None)
        write_bandwidth = disk_speed.bandwidth if disk_speed.write is None else disk_speed.write
        link = Link(disk_speed.bandwidth, write_bandwidth, conversions=self._conversions())
        hardware = Hardware(name, processing.level(), slow, link)
        return self._describe(
            hardware, start, processing, {**_processing_figures("", processing), **_disk_figures(disk_speed)}
        )

    def gpu_over_ram(self, device: Device, name: str) -> Hardware:
        """Measure the device's memory as fast level.

        The slow level is RAM with the CPU, reached through pinned memory.
        """
        start = self.clock()
        cpu, gpu = self._cpu(), self._device(device)
        copies = gpu_parts.measure_copies(device, self.effort.copy_bytes, self._watch(device), self.show)
        # A worker may need next what torch has cached here.
        device.release()
        speed = {copy.way: copy.bandwidth for copy in copies if copy.is_pinned}
        link = Link(speed["down"], speed["up"], speed["staging"])
        hardware = Hardware(name, gpu.level(), cpu.level(0.8), link)
        figures = {
            **_processing_figures("fast_", gpu),
            **_processing_figures("slow_", cpu),
            "link": _copy_figures(copies),
        }
        return self._describe(hardware, start, gpu, figures)

    def _conversions(self) -> tuple[tuple[str, float], ...]:
        """The bytes/s of converting an expert, as `Link.conversions` has them."""
        conversion = self.effort.converting
        if conversion is None:
            return ()
        self.show("conversion", 0, 1)
        rate = conversion.size / self._watch().seconds(conversion.run)
        self.show("conversion", 1, 1)
        return ((conversion.name, rate),)

    def _cpu(self) -> Processing:
        kernels, threads, free = pick("cpu", "auto"), self.threads or cores(), available_memory()
        dtypes, watch = _list_dtypes(kernels), self._watch()
        size = memory.choose_read_bytes(self.effort.read_bytes, free)
        ways = [(dtype, count) for dtype in dtypes for count in dict.fromkeys((1, threads))]
        readings: list[Reading] = []
        for dtype, count in ways:
            self.show("memory", len(readings), len(ways))
            kernels.set_threads(count, False)
            readings.append(Reading(count, dtype_name(dtype), memory.read(kernels, dtype, size, watch)))
        self.show("memory", len(ways), len(ways))
        kernels.set_threads(threads, False)
        matrix_bytes = memory.choose_matrix_bytes(free)
        rates = products.measure_rates(
            kernels, dtypes, self.effort.products, watch, self.show, min_bytes=matrix_bytes
        )
        name = f"RAM, {threads} thread{'s' if threads > 1 else ''}"
        return Processing(name, kernels.name, free, tuple(readings), rates)

    def _device(self, device: Device) -> Processing:
        kernels, watch, free = pick("cuda", "auto"), self._watch(device), device.free()
        size = min(self.effort.read_bytes, free // 8)
        readings = tuple(
            Reading(1, dtype_name(dtype), memory.read(kernels, dtype, size, watch, device.name))
            for dtype in DTYPES
        )
        rates = products.measure_rates(kernels, DTYPES, self.effort.products, watch, self.show, device.name)
        return Processing(device.title, kernels.name, free, readings, rates)

    def _watch(self, device: Device | None = None) -> Stopwatch:
        watch = Stopwatch(self.effort.seconds, self.clock)
        return watch if device is None else replace(watch, wait=device.wait)

    def _describe(
        self, hardware: Hardware, start: float, fast: Processing, measurements: dict[str, Any]
    ) -> Hardware:
        took = self.clock() - start
        source = f"measured in {took:.0f} s by microbenchmarks: {fast.kernels}, weights in {fast.dtype}"
        sizes = self.effort.products
        form = "" if sizes.packed_type is None else f", also {sizes.packed_type}"
        form = ", compressed where bf16" if sizes.packed_type == COMPRESSED_DTYPE else form
        figures = {"seconds": round(took, 1), "experts": f"{sizes.hidden} x {sizes.width}{form}"}
        return replace(hardware, source=source, measurements={**figures, **measurements})


def _list_dtypes(kernels: Kernels) -> list[torch.dtype]:
    return [dtype for dtype in DTYPES if dtype in kernels.unconverted_dtypes]


def _processing_figures(prefix: str, processing: Processing) -> dict[str, Any]:
    """The figures for the hardware file, in GiB/s and Gflops/s."""
    return {
        f"{prefix}memory": [
            {"threads": measurement.threads, "dtype": measurement.dtype, "gib": measurement.bandwidth / GIB}
            for measurement in processing.readings
        ],
        f"{prefix}products": [
            {
                "shape": measurement.shape,
                "dtype": measurement.dtype,
                "rows": measurement.rows,
                "gflops": measurement.flops / 1e9,
            }
            for measurement in processing.rates
        ],
    }


def _disk_figures(measurement: Disk) -> dict[str, Any]:
    figures: dict[str, Any] = {"file": measurement.file, "direct": measurement.direct}
    figures["disk"] = [
        {
            "repeated": read.is_repeated,
            "block_kib": read.block // 1024,
            "readers": read.readers,
            "gib": read.bandwidth / GIB,
        }
        for read in measurement.reads
    ]
    return figures if measurement.write is None else {**figures, "write_gib": measurement.write / GIB}


def _copy_figures(copies: Sequence[Copy]) -> list[dict[str, Any]]:
    return [{"way": copy.way, "pinned": copy.is_pinned, "gib": copy.bandwidth / GIB} for copy in copies]
