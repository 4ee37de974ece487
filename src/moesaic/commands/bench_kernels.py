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
from moesaic.core.weight_types import BLOCK_TYPES, COMPRESSED_DTYPE, convert_blocks, is_packed, split_dtype
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
GPU_WEIGHT_BYTES = 256 << 20
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
    speeds: list[Speed]


def run(options: KernelsBench, as_json: bool) -> int:
    """Time the operations and print the report. Returns the exit code.

    Raises ConfigError for an unknown model, and for kernels or types that this machine cannot compute.
    """
    report = time_operations(options)
    print(json.dumps(report_json(report)) if as_json else as_text(report))
    return 0


def time_operations(options: KernelsBench) -> Report:
    """Time the operations, with progress on stderr. Raises ConfigError as `run`."""
    model, device = find_model(options.model), options.device
    gpu = find_device() if device == "cuda" else None
    if device == "cuda" and gpu is None:
        raise ConfigError.field("--device", device, "cpu (torch sees no GPU)")
    kernels = table.pick(device, options.kernels)
    sizes = Sizes(
        *(model, _types(options, model, kernels), "float32" if model.number > 2 else "bfloat16"),
        *(options.kv_cache_dtype, options.rows, options.context),
        min_weight_bytes=GPU_WEIGHT_BYTES if gpu else memory.choose_matrix_bytes(available_memory()),
        device=device,
    )
    threads = options.threads or cores()
    watch = Stopwatch(options.seconds, wait=gpu.wait) if gpu else Stopwatch(options.seconds)

    def roofs() -> Roofs:
        if gpu:
            return roofline.device_roofs(watch, device)
        return roofline.roofs(kernels, options.kernels, threads, watch)

    # The roofs are measured before and after: other processes may slow the machine down meanwhile.
    with progress(Console(stderr=True), time.monotonic, None) as show:
        first_roofs = roofs()
        speeds = roofline.measure(kernels, options.kernels, sizes, watch, show)
        best = first_roofs.best(roofs())
    processor = gpu.title if gpu else examine().cpu
    return Report(options, model.name, kernels.name, threads, processor, best, speeds)


def _types(options: KernelsBench, model: ModelSizes, kernels: Kernels) -> tuple[str, ...]:
    model_type = COMPRESSED_DTYPE if model.has_compressed_experts else model.quantized_dtype
    types = options.types or tuple(dict.fromkeys((*USUAL, *((model_type,) if model_type else ()))))
    for name in types if kernels.can_use_quantized else ():
        _check_blocks(model, name)
    if kernels.can_use_blocks:
        return types
    unread_types = [name for name in types if is_packed(name) and not _is_read(kernels, name)]
    for name in unread_types:
        if name in options.types:
            allowed_types = "no types of GGUF files" if kernels.can_use_quantized else "bfloat16, float32"
            raise ConfigError.field("--types", name, f"{allowed_types} with {kernels.name}")
    return tuple(name for name in types if name not in unread_types)


def _is_read(kernels: Kernels, name: str) -> bool:
    """Whether kernels compute from a packed type."""
    return kernels.can_use_quantized and convert_blocks(name) == name


def _check_blocks(model: ModelSizes, name: str) -> None:
    """Raises ConfigError for a type whose blocks do not fill the rows of the model's experts."""
    for dtype, columns in zip(split_dtype(name), (model.hidden, model.expert_width), strict=True):
        numbers = BLOCK_TYPES[dtype].numbers if dtype in BLOCK_TYPES else 1
        if columns % numbers:
            allowed_types = f"types whose blocks fill rows of {columns} numbers, not {numbers} a block"
            raise ConfigError.field("--types", name, allowed_types)


def as_text(report: Report) -> str:
    """A table, with what it is measured against above it."""
    roofs, threads = report.roofs, report.threads
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("operation", "type"):
        table.add_column(column, no_wrap=True)
    for column in ("rows", "context", "us", "GB/s", "GFLOP/s", "of roof"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound")
    last: tuple[str, str] | None = None
    for speed in report.speeds:
        call, work = speed.call, speed.call.work
        name = (call.operation, call.stored_type)
        table.add_row(
            *(name if name != last else ("", "")),
            *(str(call.rows), "" if call.context is None else str(call.context)),
            *(f"{1e6 * speed.seconds:.0f}", f"{work.bytes / speed.seconds / 1e9:.1f}"),
            *(f"{work.flops / speed.seconds / 1e9:.0f}", f"{speed.share(roofs):.0%}", speed.bound(roofs)),
        )
        last = name
    on_gpu = report.options.device == "cuda"
    memory_test = "a copy in its memory" if on_gpu else "memcmp"
    processor = (
        report.processor if on_gpu else f"{threads} thread{'s' if threads > 1 else ''}, {report.processor}"
    )
    lines = [
        f"One layer of {report.model}, {report.kernels}, {processor}",
        f"Memory is read at {roofs.bandwidth / 1e9:.1f} GB/s ({memory_test}).",
        _computing(roofs, report.kernels),
        "GB/s counts weights and cache once, GFLOP/s two operations a weight and row.",
        in_text(table),
    ]
    return "\n".join(lines)


def _computing(roofs: Roofs, kernels: str) -> str:
    """The roof of computing, and how it was measured."""
    if not kernels.startswith("native"):
        return f"torch multiplies large matrices at {roofs.flops / 1e9:.0f} GFLOP/s."
    own_products = (
        ""
        if roofs.own_flops is None
        else f", and at {roofs.own_flops / 1e9:.0f} as {kernels} does with its own types"
    )
    speed = f"{roofs.flops / 1e9:.0f} GFLOP/s in float32{own_products}"
    return f"Numbers in registers are multiplied and added at {speed}."


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON: times in microseconds, speeds in GB/s and GFLOP/s."""
    options, roofs = report.options, report.roofs
    own_products = {} if roofs.own_flops is None else {"own_gflop_per_s": roofs.own_flops / 1e9}
    return {
        "model": options.model,
        "gpu" if options.device == "cuda" else "cpu": report.processor,
        "kernels": report.kernels,
        "threads": report.threads,
        "roofs": {"gb_per_s": roofs.bandwidth / 1e9, "gflop_per_s": roofs.flops / 1e9, **own_products},
        "operations": [
            {
                "operation": speed.call.operation,
                "type": speed.call.stored_type,
                "rows": speed.call.rows,
                "context": speed.call.context,
                "microseconds": 1e6 * speed.seconds,
                "gb_per_s": speed.call.work.bytes / speed.seconds / 1e9,
                "gflop_per_s": speed.call.work.flops / speed.seconds / 1e9,
                "share_of_roof": speed.share(roofs),
                "bound": speed.bound(roofs),
            }
            for speed in report.speeds
        ],
    }
