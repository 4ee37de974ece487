"""`moesaic bench kernels`: times each operation of a model's layer and prints its share of the roofline."""

from __future__ import annotations

import json
import time
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
from moesaic.hardware import memory, roofline
from moesaic.hardware.operations import Sizes
from moesaic.hardware.roofline import Roofs, Speed
from moesaic.hardware.timing import Stopwatch
from moesaic.kernels import table
from moesaic.kernels.table import Kernels
from moesaic.runtime.machine import available_memory, cores

USUAL = ("bfloat16", "int8", "int4")
"""Types of experts that are timed if none is given."""


def run(options: KernelsBench, as_json: bool) -> int:
    """Time the operations and print the report. Returns the exit code.

    Raises ConfigError for an unknown model, and for kernels or types that this machine cannot compute.
    """
    model = find_model(options.model)
    kernels = table.pick("cpu", options.kernels)
    sizes = Sizes(
        *(model, _types(options, model, kernels), "float32" if model.number > 2 else "bfloat16"),
        *(options.kv_cache_dtype, options.rows, options.context),
        beyond=memory.beyond_caches(available_memory()),
    )
    threads, watch = options.threads or cores(), Stopwatch(options.seconds)
    with progress(Console(stderr=True), time.monotonic, "figures/s") as show:
        before = roofline.roofs(kernels, options.kernels, threads, watch)
        found = roofline.measure(kernels, options.kernels, sizes, watch, show)
        roofs = before.best(roofline.roofs(kernels, options.kernels, threads, watch))
    if as_json:
        print(json.dumps(_as_json(options, kernels, threads, roofs, found)))
    else:
        print(as_text(model.name, kernels.name, threads, roofs, found))
    return 0


def _types(options: KernelsBench, model: ModelSizes, kernels: Kernels) -> tuple[str, ...]:
    own = COMPRESSED if model.compressed else model.quantized
    wanted = options.types or tuple(dict.fromkeys((*USUAL, *((own,) if own else ()))))
    if kernels.packed:
        return wanted
    refused = [one for one in options.types if is_packed(one)]
    if refused:
        raise ConfigError.field("--types", refused[0], f"bfloat16, float32 with {kernels.name}")
    return tuple(one for one in wanted if not is_packed(one))


def as_text(model: str, kernels: str, threads: int, roofs: Roofs, found: list[Speed]) -> str:
    """A table, with what it is measured against above it."""
    told = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("operation", "type"):
        told.add_column(column, no_wrap=True)
    for column in ("rows", "context", "us", "GB/s", "GFLOP/s", "of roof"):
        told.add_column(column, justify="right", no_wrap=True)
    told.add_column("bound")
    last: tuple[str, str] | None = None
    for one in found:
        call, work = one.call, one.call.work
        name = (call.operation, call.stored)
        told.add_row(
            *(name if name != last else ("", "")),
            *(str(call.rows), "" if call.context is None else str(call.context)),
            *(f"{1e6 * one.seconds:.0f}", f"{work.bytes / one.seconds / 1e9:.1f}"),
            *(f"{work.flops / one.seconds / 1e9:.0f}", f"{one.share(roofs):.0%}", one.bound(roofs)),
        )
        last = name
    lines = [
        f"One layer of {model}, {kernels}, {threads} thread{'s' if threads > 1 else ''}, {examine().cpu}",
        f"Memory is read at {roofs.bandwidth / 1e9:.1f} GB/s (memcmp).",
        _computing(roofs, kernels),
        "GB/s counts weights and cache once, GFLOP/s two operations a weight and row.",
        in_text(told),
    ]
    return "\n".join(lines)


def _computing(roofs: Roofs, kernels: str) -> str:
    """The roof of computing, and how it was measured."""
    if not kernels.startswith("native"):
        return f"torch multiplies large matrices at {roofs.flops / 1e9:.0f} GFLOP/s."
    own = "" if roofs.own is None else f", and at {roofs.own / 1e9:.0f} as {kernels} does with its own types"
    return (
        f"Numbers in registers are multiplied and added at {roofs.flops / 1e9:.0f} GFLOP/s in float32{own}."
    )


def _as_json(
    options: KernelsBench, kernels: Kernels, threads: int, roofs: Roofs, found: list[Speed]
) -> dict[str, Any]:
    own = {} if roofs.own is None else {"own_gflop_per_s": roofs.own / 1e9}
    return {
        "model": options.model,
        "cpu": examine().cpu,
        "kernels": kernels.name,
        "threads": threads,
        "roofs": {"gb_per_s": roofs.bandwidth / 1e9, "gflop_per_s": roofs.flops / 1e9, **own},
        "operations": [
            {
                "operation": one.call.operation,
                "type": one.call.stored,
                "rows": one.call.rows,
                "context": one.call.context,
                "microseconds": 1e6 * one.seconds,
                "gb_per_s": one.call.work.bytes / one.seconds / 1e9,
                "gflop_per_s": one.call.work.flops / one.seconds / 1e9,
                "share_of_roof": one.share(roofs),
                "bound": one.bound(roofs),
            }
            for one in found
        ],
    }
