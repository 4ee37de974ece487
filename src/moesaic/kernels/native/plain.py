"""The expert kernel on plain arrays, for processes that never import torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.kernels.native import _native

FloatRows = npt.NDArray[np.float32]


def use(name: str | None = None) -> str:
    """Picks an instruction set, None for the fastest. Returns its name; ValueError if this CPU has it not."""
    sets = _native.instruction_sets()
    name = sets[0] if name is None else name
    if name not in sets:
        raise ValueError(f"{name} is not one of {', '.join(sets)}")
    _native.use(name)
    return name


def set_threads(threads: int, pin: bool) -> None:
    """Of the process's one pool."""
    _native.set_threads(threads, pin)


def experts(
    table: npt.NDArray[np.uint64],
    width: int,
    wide: bool,
    hidden: FloatRows,
    expert_ids: npt.NDArray[np.int64],
    out: FloatRows,
) -> None:
    """Row i of hidden [n, h] through expert expert_ids[i], unweighted, into out [n, h].

    table [3, E]: addresses of gate [w, h], up [w, h] and down [h, w] of each expert, 0 where it is not held;
    wide: stored in float32, else bf16. Raises KeyError for an expert that is not held, ValueError for arrays
    that do not fit.
    """
    n, size = hidden.shape
    fits = out.shape == hidden.shape and expert_ids.shape == (n,) and table.shape[0] == 3
    dense = all(array.flags.c_contiguous for array in (table, hidden, expert_ids, out))
    kinds = [array.dtype for array in (table, hidden, expert_ids, out)]
    if not fits or not dense or kinds != [np.uint64, np.float32, np.int64, np.float32]:
        raise ValueError(f"hidden {hidden.shape}, ids {expert_ids.shape} and out {out.shape} do not fit")
    if n == 0:
        return
    gate, up, down = (int(table.ctypes.data) + line * table.strides[0] for line in range(3))
    absent = _native.experts(
        hidden.ctypes.data, expert_ids.ctypes.data, gate, up, down, out.ctypes.data, n, 1, size, width,
        table.shape[1], wide,
    )  # fmt: skip
    if absent != _native.ALL_HELD:
        raise KeyError(f"expert {int(expert_ids[absent])} is not held here")
