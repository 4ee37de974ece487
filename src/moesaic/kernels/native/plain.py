"""The expert kernel on plain arrays, for processes that never import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """Of the process's one pool."""
    _native.set_threads(threads, pin)


Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Scattered:
    """Rows and answers that lie anywhere. Whoever makes one vouches for the addresses."""

    rows: Addresses
    """[n] of float32 [h] each."""
    row_of: npt.NDArray[np.int64]
    """[p] 0 to n - 1"""
    out: Addresses
    """[p] of float32 [h] each."""


def experts(
    table: Addresses,
    size: tuple[int, int],
    wide: bool,
    where: Scattered,
    expert_ids: npt.NDArray[np.int64],
) -> None:
    """Pair i: row where.row_of[i] through expert expert_ids[i], unweighted, to where.out[i].

    table [3, E]: addresses of gate [w, h], up [w, h] and down [h, w] of each expert, 0 where it is not held;
    size: (h, w); wide: stored in float32, else bf16. Raises KeyError for an expert that is not held, and
    nothing is written then; ValueError for arrays that do not fit.
    """
    arrays = (where.rows, where.row_of, where.out, expert_ids, table)
    kinds = [array.dtype for array in arrays]
    pairs = len(expert_ids)
    if kinds != [np.uint64, np.int64, np.uint64, np.int64, np.uint64] or table.shape[0] != 3:
        raise ValueError(f"arrays of {', '.join(map(str, kinds))} do not fit")
    if not len(where.row_of) == len(where.out) == pairs or not all(one.flags.c_contiguous for one in arrays):
        raise ValueError(f"{len(where.row_of)} rows, {len(where.out)} answers, {pairs} experts do not fit")
    if pairs == 0:
        return
    if not 0 <= int(where.row_of.min()) <= int(where.row_of.max()) < len(where.rows):
        raise ValueError(f"rows {where.row_of.min()} to {where.row_of.max()} of {len(where.rows)}")
    gate, up, down = (int(table.ctypes.data) + line * table.strides[0] for line in range(3))
    rows, row_of, out, ids = (int(one.ctypes.data) for one in arrays[:4])
    absent = _native.scattered_experts(
        rows, row_of, ids, gate, up, down, out, len(where.rows), pairs, *size, table.shape[1], wide
    )
    if absent != _native.ALL_HELD:
        raise KeyError(f"expert {int(expert_ids[absent])} is not held here")
