"""The expert kernel on plain arrays, for processes that never import torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.kernels.native import _native


def use(name: str | None = None) -> str:
    """Picks an instruction set, None for auto's. Returns its name; ValueError if this CPU has it not."""
    sets = _native.instruction_sets()
    name = sets[0] if name is None else name
    if name not in sets:
        raise ValueError(f"{name} is not one of {', '.join(sets)}")
    _native.use(name)
    return name


def set_threads(threads: int, pin: bool) -> None:
    """Of the process's one pool. Raises ConfigError, and changes nothing, where there are not as many."""
    try:
        _native.set_threads(threads, pin)
    except (OSError, MemoryError) as error:
        allowed = f"as many as this system can start: {error}"
        raise ConfigError.field("--threads", threads, allowed) from error


Addresses = npt.NDArray[np.uint64]
Part = tuple[FloatRows, IntArray, IntArray, FloatRows, IntArray]
"""Rows [m, h], of each pair its row and its expert [p], answers [q, h], of each pair its line there [p]."""


def experts(table: Addresses, size: tuple[int, int], stored: int, parts: list[Part]) -> None:
    """Each pair's row through its expert, unweighted, to its line; all parts as one batch.

    table [3, E]: addresses of gate [w, h], up [w, h] and down [h, w] of each expert, 0 where it is not held;
    size: (h, w); stored: which of OF_EXPERTS they are. Raises KeyError for an expert that is not held,
    ValueError for arrays that do not fit; nothing is written then.
    """
    _native.gathered_experts(table, *size, stored, parts)


def put(out: FloatRows, lines: IntArray, rows: FloatRows, places: IntArray) -> None:
    """out[lines] = rows[places], by all threads.

    out [n, h], rows [m, h] dense; lines, places [p]. Raises ValueError for arrays that do not fit, and for
    lines or places that are none; nothing is written then.
    """
    _native.put(out, lines, rows, places)
