"""`moesaic bench kernels`: times each operation of a model's layer and prints its share of the roofline."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moesaic.commands.machine import examine
from moesaic.commands.options import KernelsBench
from moesaic.commands.plan import find_model
from moesaic.commands.processes import in_text
from moesaic.commands.progress import progress
from moesaic.core.errors import ConfigError
from moesaic.core.stored import COMPRESSED, is_packed
from moesaic.cost.sizes import ModelSizes
from moesaic.kernels import table
from moesaic.kernels.table import Kernels
from moesaic.planning.hardware import memory, roofline
from moesaic.planning.hardware.device import find_device
from moesaic.planning.hardware.operations import Sizes
from moesaic.planning.hardware.roofline import Roofs, Speed
from moesaic.planning.hardware.timing import Stopwatch
from moesaic.runtime.machine import available_memory, cores

USUAL = ("bfloat16", "int8", "int4")
"""Types of experts that are timed if none is given."""
BEYOND = 256 << 20
"""Bytes that the caches of no GPU hold."""


@dataclass(frozen=True)
class Report:
    """What was timed, where, and beside which roofs."""

    options: KernelsBench
    model: str
    kernels: str
    threads: int
    processor: str
    roofs: Roofs
    found: list[Speed]


def run(options: KernelsBench, as_json: bool) -> int:
    """Time the operations and print the report. Returns the exit code.

    Raises ConfigError for an unknown model, and for kernels or types that this machine cannot compute.
    """
    report = measured(options)
    print(json.dumps(report_json(report)) if as_json else as_text(report))
    return 0


def measured(options: KernelsBench) -> Report:
    """Time the operations, with progress on stderr. Raises ConfigError as `run`."""
    model, device = find_model(options.model), options.device
    gpu = find_device() if device == "cuda" else None
    if device == "cuda" and gpu is None:
        raise ConfigError.field("--device", device, "cpu (torch sees no GPU)")
    kernels = table.pick(device, options.kernels)
    sizes = Sizes(
        *(model, _types(options, model, kernels), "float32" if model.number > 2 else "bfloat16"),
        *(options.kv_cache_dtype, options.rows, options.context),
        min_weight_bytes=BEYOND if gpu else memory.choose_matrix_bytes(available_memory()),
        device=device,
    )
    threads = options.threads or cores()
    watch = Stopwatch(options.seconds, wait=gpu.wait) if gpu else Stopwatch(options.seconds)

    def roofs() -> Roofs:
        if gpu:
            return roofline.device_roofs(watch, device)
        return roofline.roofs(kernels, options.kernels, threads, watch)

    with progress(Console(stderr=True), time.monotonic, "figures/s") as show:
        before = roofs()
        found = roofline.measure(kernels, options.kernels, sizes, watch, show)
        best = before.best(roofs())
    processor = gpu.title if gpu else examine().cpu
    return Report(options, model.name, kernels.name, threads, processor, best, found)


def _types(options: KernelsBench, model: ModelSizes, kernels: Kernels) -> tuple[str, ...]:
    own = COMPRESSED if model.compressed else model.quantized
    wanted = options.types or tuple(dict.fromkeys((*USUAL, *((own,) if own else ()))))
    if kernels.can_use_quantized:
        return wanted
    refused = [one for one in options.types if is_packed(one)]
    if refused:
        raise ConfigError.field("--types", refused[0], f"bfloat16, float32 with {kernels.name}")
    return tuple(one for one in wanted if not is_packed(one))


def as_text(report: Report) -> str:
    """A table, with what it is measured against above it."""
    roofs, threads = report.roofs, report.threads
    told = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("operation", "type"):
        told.add_column(column, no_wrap=True)
    for column in ("rows", "context", "us", "GB/s", "GFLOP/s", "of roof"):
        told.add_column(column, justify="right", no_wrap=True)
    told.add_column("bound")
    last: tuple[str, str] | None = None
    for one in report.found:
        call, work = one.call, one.call.work
        name = (call.operation, call.stored_type)
        told.add_row(
            *(name if name != last else ("", "")),
            *(str(call.rows), "" if call.context is None else str(call.context)),
            *(f"{1e6 * one.seconds:.0f}", f"{work.bytes / one.seconds / 1e9:.1f}"),
            *(f"{work.flops / one.seconds / 1e9:.0f}", f"{one.share(roofs):.0%}", one.bound(roofs)),
        )
        last = name
    on_gpu = report.options.device == "cuda"
    how = "a copy in its memory" if on_gpu else "memcmp"
    by = report.processor if on_gpu else f"{threads} thread{'s' if threads > 1 else ''}, {report.processor}"
    lines = [
        f"One layer of {report.model}, {report.kernels}, {by}",
        f"Memory is read at {roofs.bandwidth / 1e9:.1f} GB/s ({how}).",
        _computing(roofs, report.kernels),
        "GB/s counts weights and cache once, GFLOP/s two operations a weight and row.",
        in_text(told),
    ]
    return "\n".join(lines)


def _computing(roofs: Roofs, kernels: str) -> str:
    """The roof of computing, and how it was measured."""
    if not kernels.startswith("native"):
        return f"torch multiplies large matrices at {roofs.flops / 1e9:.0f} GFLOP/s."
    own = (
        ""
        if roofs.own_flops is None
        else f", and at {roofs.own_flops / 1e9:.0f} as {kernels} does with its own types"
    )
    return (
        f"Numbers in registers are multiplied and added at {roofs.flops / 1e9:.0f} GFLOP/s in float32{own}."
    )


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON: times in microseconds, speeds in GB/s and GFLOP/s."""
    options, roofs = report.options, report.roofs
    own = {} if roofs.own_flops is None else {"own_gflop_per_s": roofs.own_flops / 1e9}
    return {
        "model": options.model,
        "gpu" if options.device == "cuda" else "cpu": report.processor,
        "kernels": report.kernels,
        "threads": report.threads,
        "roofs": {"gb_per_s": roofs.bandwidth / 1e9, "gflop_per_s": roofs.flops / 1e9, **own},
        "operations": [
            {
                "operation": one.call.operation,
                "type": one.call.stored_type,
                "rows": one.call.rows,
                "context": one.call.context,
                "microseconds": 1e6 * one.seconds,
                "gb_per_s": one.call.work.bytes / one.seconds / 1e9,
                "gflop_per_s": one.call.work.flops / one.seconds / 1e9,
                "share_of_roof": one.share(roofs),
                "bound": one.bound(roofs),
            }
            for one in report.found
        ],
    }
