"""What `moesaic doctor` says of kernels: how much faster those are that round rows, and what that changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table

from moesaic.kernels import table
from moesaic.planning.hardware import products
from moesaic.planning.hardware.timing import Stopwatch

SECONDS = 0.1
"""Seconds of each timing."""
ROWS = (1, 64)
"""Rows of each expert: about those of decoding for few requests, and those of a prompt."""
GGUF_TYPE = "q4_k"
"""The type of most weights of the GGUF files that are loaded most."""
HOW_ROUNDED = {"bfloat16": "bf16, as in vLLM and llama.cpp", GGUF_TYPE: "int8, as in llama.cpp"}


@dataclass(frozen=True)
class KernelSpeed:
    """The speed of experts of 2048 x 768 with the kernels of one instruction set."""

    kernels: str
    weights: str
    """Type of the weights, a name of `core.weight_types`."""
    rounds_to: str
    """What rows are rounded to before they meet the weights. Empty: nothing."""
    gflops: dict[int, float]
    """Rows of each expert -> Gflops/s."""


def measure_kernels(threads: int) -> list[KernelSpeed]:
    """The kernels that `auto` takes on this CPU, and those that round, for weights in bf16 and in q4_k.

    Leaves the kernels that `auto` takes. Empty if this CPU has none that round.
    """
    speeds = []
    for stored_type, rounded in HOW_ROUNDED.items():
        if rounding_sets := table.list_rounding_sets([stored_type]):
            speeds += [_measure("auto", stored_type, "", threads)]
            speeds += [_measure(name, stored_type, rounded, threads) for name in rounding_sets]
    table.pick("cpu")
    return speeds


def _measure(name: str, stored_type: str, rounded: str, threads: int) -> KernelSpeed:
    kernels = table.pick("cpu", name)
    kernels.set_threads(threads, False)
    is_bf16 = stored_type == "bfloat16"
    sizes = products.Sizes(rows=ROWS, packed_type=None if is_bf16 else stored_type)
    dtypes = [torch.bfloat16] if is_bf16 else []
    rates = products.measure_rates(kernels, dtypes, sizes, Stopwatch(SECONDS), lambda *_: None)
    by_rows = {rows: flops / 1e9 for rows, flops in products.flops_by_rows(rates, stored_type)}
    set_name = kernels.name.removeprefix("native (").removesuffix(")")
    return KernelSpeed(set_name, stored_type, rounded, {rows: round(by_rows[rows], 1) for rows in ROWS})


def as_table(speeds: list[KernelSpeed]) -> Table:
    """A row for each of the kernels, and the ratio to those of `auto`."""
    shown = Table(
        title="Kernels: Gflops/s of experts, by rows of each",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    for column in ("--kernels", "weights", "rounds rows to", "1 row", "64 rows"):
        shown.add_column(column, justify="right" if column[0].isdigit() else "left")
    first_speeds: dict[str, KernelSpeed] = {}
    for speed in speeds:
        first = first_speeds.setdefault(speed.weights, speed)
        name = f"auto ({speed.kernels})" if speed is first else speed.kernels
        ratios = [
            f" ({speed.gflops[rows] / first.gflops[rows]:.2f}x)" * (speed is not first) for rows in ROWS
        ]
        figures = [f"{speed.gflops[rows]:.3g}{ratio}" for rows, ratio in zip(ROWS, ratios, strict=True)]
        shown.add_row(name, speed.weights, speed.rounds_to or "nothing", *figures)
    return shown
