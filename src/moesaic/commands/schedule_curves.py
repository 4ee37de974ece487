"""What `moesaic doctor` says of expert servers: how long runs take here, and which rows run alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.core.curves import Curve, DeviceCurves
from moesaic.cost.curves import of_device
from moesaic.experts import measuring
from moesaic.kernels import table
from moesaic.planning.hardware.products import random
from moesaic.policy.scheduling.minimum_batch import MAX_THRESHOLD, Decisions, cpu_curves

MODEL = "Qwen3-30B-A3B"
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
"""Sizes of MODEL, which the curves are for."""
OTHER_WEIGHTS = 2 * HIDDEN * 4096 + 2 * HIDDEN * 512
"""Weights of a layer of MODEL besides its experts."""
MATRICES = 8
"""Matrices of HIDDEN x HIDDEN that are measured: more than most caches hold."""
ROWS = (1, 16, 64, 256, 1024)
"""Rows that are shown."""


@dataclass(frozen=True)
class Schedule:
    """The curves of one device, and what follows from them with --schedule async."""

    source: str
    model: str
    attention_ms: dict[int, float]
    """Milliseconds of a worker's run, by rows."""
    experts_ms: dict[int, float]
    """Milliseconds of a run of one expert, by pairs."""
    shared: bool
    """Whether workers and servers share their cores."""
    separate_rows: int | None
    """Rows of which half go on alone, halved. None: never, while the device is busy."""
    told_rows: int
    waited_pairs: int
    """Pairs for which a server waits that holds all experts of a layer."""
    expert_queues: bool


def find(gpu: str | None, threads: int) -> Schedule:
    """The schedule for MODEL on a GPU with this name, or measured on this machine's CPU.

    A GPU that is not known has the curves of a CPU, as in `runtime.in_memory`.
    """
    expert = 3.0 * HIDDEN * WIDTH
    if gpu is None:
        return derive_schedule(cpu_curves(expert, OTHER_WEIGHTS, threads, _ratio(threads)))
    gpu_curves = of_device(gpu, expert, OTHER_WEIGHTS, 2.0)
    return derive_schedule(gpu_curves or replace(cpu_curves(expert, OTHER_WEIGHTS), shares_cores=False))


def derive_schedule(curves: DeviceCurves) -> Schedule:
    """What the curves say about MODEL."""
    decisions = Decisions(curves, EXPERTS, TOP_K)
    separate = decisions.separate_rows
    return Schedule(
        curves.source,
        MODEL,
        _run_milliseconds(curves.attention, 0),
        _run_milliseconds(curves.experts, 1),
        curves.shares_cores,
        None if separate == MAX_THRESHOLD else separate,
        decisions.partial_answer_rows,
        decisions.min_call_pairs(EXPERTS),
        decisions.has_expert_queues,
    )


def facts(schedule: Schedule) -> dict[str, str]:
    """The lines about a schedule for people: label -> text."""
    separate, waits = schedule.separate_rows, schedule.waited_pairs
    return {
        "times": f"{schedule.source}, for a layer of {schedule.model}",
        "attention, by tokens": _line(schedule.attention_ms),
        "one expert, by tokens": _line(schedule.experts_ms),
        "a batch is cut": "never"
        if separate is None
        else f"in parts that do not wait, from {separate} tokens",
        "servers answer": f"in parts where more than {schedule.told_rows} tokens ask",
        "servers wait": f"for more while fewer than {waits} experts of tokens are asked"
        if waits
        else "never",
        "servers compute": "each expert alone"
        if schedule.expert_queues
        else "all experts of a layer together",
    }


def _ratio(threads: int) -> float | None:
    """Measured with the kernels that are chosen here, in the type of most checkpoints if they store it."""
    kernels = table.pick("cpu")
    kernels.set_threads(threads, False)
    dtype = torch.bfloat16 if torch.bfloat16 in kernels.unconverted_dtypes else torch.float32
    matrices = [random((HIDDEN, HIDDEN), dtype, "cpu") for _ in range(MATRICES)]

    def run(rows: int) -> None:
        states = torch.full((rows, HIDDEN), 0.01)
        for matrix in matrices:
            kernels.linear(states, matrix)

    cache_key = {"kernels": kernels.name, "threads": threads, "sizes": (HIDDEN, MATRICES), "type": str(dtype)}
    return measuring.measure_ratio(run, cache_key)


def _run_milliseconds(curve: Curve, experts: int) -> dict[int, float]:
    return {rows: round(1e3 * curve.seconds(rows, experts), 4) for rows in ROWS}


def _line(points: dict[int, float]) -> str:
    return ", ".join(f"{rows}: {ms:.3g} ms" for rows, ms in points.items())
