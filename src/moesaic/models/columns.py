"""Experts that a checkpoint stores in columns, as the rows that kernels read. Does not import torch.

`core.experts.ExpertLayout.form` describes both forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
NUMBERS = {2: np.uint16, 4: np.uint32}
"""Bytes of a number -> an integer of that size. Only the order of numbers changes."""


def as_rows(parts: Sequence[Bytes], number: int, width: int) -> list[Bytes]:
    """Gate [w, h], up [w, h], down [h, w] and the biases of these, in bytes.

    parts: the bytes of `column_tensors`. number: bytes of a number of the matrices; those of biases have 4.
    width: w.
    """
    gate_up, down, inner_bias, down_bias = parts
    inner = gate_up.view(NUMBERS[number]).reshape(-1, width, 2)
    outer = down.view(NUMBERS[number]).reshape(width, -1)
    biases = inner_bias.view(np.uint32).reshape(width, 2)
    found = (inner[:, :, 0].T, inner[:, :, 1].T, outer.T, biases[:, 0], biases[:, 1])
    return [*(np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in found), down_bias]
