"""Measures how much faster kernels are that round rows, for `moesaic doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.kernels import table
from moesaic.planning.hardware import products
from moesaic.planning.hardware.timing import Stopwatch

SECONDS = 0.1
"""Seconds of each timing."""
ROWS = (1, 64)
"""Rows of each expert: about those of decoding for few requests, and those of a prompt."""
GGUF_TYPE = "q4_k"
"""The type of most weights of the GGUF files that are loaded most."""
ROW_TYPES = {"bfloat16": "bf16, as in vLLM and llama.cpp", GGUF_TYPE: "int8, as in llama.cpp"}


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
    for stored_type, row_type in ROW_TYPES.items():
        if rounding_sets := table.list_rounding_sets([stored_type]):
            speeds += [_measure("auto", stored_type, "", threads)]
            speeds += [_measure(name, stored_type, row_type, threads) for name in rounding_sets]
    table.pick("cpu")
    return speeds


def _measure(name: str, stored_type: str, row_type: str, threads: int) -> KernelSpeed:
    kernels = table.pick("cpu", name)
    kernels.set_threads(threads, False)
    is_bf16 = stored_type == "bfloat16"
    sizes = products.Sizes(rows=ROWS, packed_type=None if is_bf16 else stored_type)
    dtypes = [torch.bfloat16] if is_bf16 else []
    rates = products.measure_rates(kernels, dtypes, sizes, Stopwatch(SECONDS), lambda *_: None)
    by_rows = {rows: flops / 1e9 for rows, flops in products.flops_by_rows(rates, stored_type)}
    set_name = kernels.name.removeprefix("native (").removesuffix(")")
    return KernelSpeed(set_name, stored_type, row_type, {rows: round(by_rows[rows], 1) for rows in ROWS})
