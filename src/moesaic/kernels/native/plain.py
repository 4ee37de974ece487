"""The expert kernel on plain arrays and its threads, for processes that never import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.experts import SILU, Activation
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.kernels.native import _native


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, as `kernels.table.instruction_sets` lists them."""
    return tuple(_native.instruction_sets())


def use(name: str | None = None) -> str:
    """Selects an instruction set; None means the one that auto selects. Returns its name. Raises ValueError
    if this CPU lacks it."""
    sets = _native.instruction_sets()
    name = sets[0] if name is None else name
    if name not in sets:
        raise ValueError(f"{name} is not one of {', '.join(sets)}")
    _native.use(name)
    return name


def set_threads(threads: int, pin: bool) -> None:
    """Sets the threads of the process's pool. Raises ConfigError, and changes nothing, if the system lacks
    threads."""
    try:
        _native.set_threads(threads, pin)
    except (OSError, MemoryError) as error:
        allowed_threads = f"as many as this system can start: {error}"
        raise ConfigError.field("--threads", threads, allowed_threads) from error


Addresses = npt.NDArray[np.uint64]
Part = tuple[FloatRows, IntArray, IntArray, FloatRows, IntArray]
"""Rows [m, h]; row and expert of each pair [p]; results [q, h]; line of each pair's result [p]."""


def numbers(activation: Activation) -> tuple[float, float, float]:
    """An activation as the compiled module takes it: alpha, added, limit."""
    limit = float("inf") if activation.limit is None else activation.limit
    return activation.alpha, activation.up_offset, limit


def experts(
    table: Addresses, size: tuple[int, int], dtype_code: int, parts: list[Part], activation: Activation = SILU
) -> None:
    """Computes the pairs of all parts as one batch, and writes each result to its line, without gate weights.

    table [3, E]: addresses of gate [w, h], up [w, h] and down [h, w] of each expert, 0 for an expert that is
    not here; or [6, E]: then also of their biases [w], [w] and [h] float32. size: (h, w). dtype_code: the
    `core.weight_types.expert_code` of their dtype. Raises KeyError for an expert that is not here, and
    ValueError for arrays that do not fit. After an error nothing has been written.
    """
    _native.gathered_experts(table, *size, dtype_code, parts, *numbers(activation))


def put(output: FloatRows, lines: IntArray, rows: FloatRows, places: IntArray) -> None:
    """Computes out[lines] = rows[places] on all threads.

    out [n, h], rows [m, h] dense; lines, places [p]. Raises ValueError, and writes nothing, for arrays that
    do not fit and for lines or places out of range.
    """
    _native.put(output, lines, rows, places)


def own_pool(threads: int, cpus: Sequence[int] = ()) -> None:
    """Give the calling thread a pool of `threads`, including itself, until `shared_pool()` or its end.

    Two lanes of a schedule can then compute at once, each with its own threads and memory. Without such a
    pool, the operations of all threads run one at a time on the process's shared pool. The bits are the same
    either way.

    cpus: CPUs that they are pinned to, this thread first; empty: not pinned. A recording computes on the
    pool of the thread that runs it. Raises ConfigError for no threads and for a CPU that this thread may
    not use. Raises RuntimeError if the system has no more threads; this thread is then on the shared pool.
    """
    if threads < 1:
        raise ConfigError.field("threads", threads, "1 or more")
    allowed_threads = _native.cpus()
    for cpu in cpus:
        if cpu not in allowed_threads:
            raise ConfigError.field("cpus", cpu, ", ".join(map(str, allowed_threads)))
    _native.own_pool(threads, list(cpus))


def shared_pool() -> None:
    """Return the calling thread to the process's pool, and to the CPUs that it had before it was pinned."""
    _native.shared_pool()
