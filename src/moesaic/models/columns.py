"""Experts that a checkpoint stores in columns, as the rows that kernels read. Does not import torch.

`core.experts.ExpertLayout.form` describes these forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
NUMBERS = {2: np.uint16, 4: np.uint32}
"""Bytes of a number -> an integer of that size. Only the order of numbers changes."""
BAND = 128
"""Rows that are transposed at a time."""


def as_rows(parts: Sequence[Bytes], number: int, width: int) -> list[Bytes]:
    """Gate [w, h], up [w, h], down [h, w] and the biases of these, in bytes.

    parts: the bytes of `column_tensors`. number: bytes of a number of the matrices; those of biases have 4.
    width: w.
    """
    gate_up, down_proj, inner_bias, down_bias = parts
    inner = gate_up.view(NUMBERS[number]).reshape(-1, width, 2)
    outer = down_proj.view(NUMBERS[number]).reshape(width, -1)
    matrices = map(_transposed_bytes, (inner[:, :, 0], inner[:, :, 1], outer))
    return [*matrices, *bias_rows(inner_bias, width), down_bias]


def halves_as_rows(parts: Sequence[Bytes], number: int, width: int) -> list[Bytes]:
    """Gate [w, h], up [w, h] and down [h, w], in bytes, of an expert in HALF_COLUMNS.

    parts: the bytes of the two matrices. number: bytes of a number. width: w.
    """
    gate_up, down_proj = (part.view(NUMBERS[number]) for part in parts)
    inner = gate_up.reshape(-1, 2, width)
    return list(map(_transposed_bytes, (inner[:, 0], inner[:, 1], down_proj.reshape(width, -1))))


def transpose_bytes(matrix: Bytes, number: int, rows: int) -> Bytes:
    """The bytes of a matrix [m, rows], from those of one [rows, m] with numbers of `number` bytes."""
    return _transposed_bytes(matrix.view(NUMBERS[number]).reshape(rows, -1))


def _transposed_bytes(matrix: npt.NDArray[Any]) -> Bytes:
    transposed_numbers = np.empty(matrix.shape[::-1], matrix.dtype)
    transpose(matrix, transposed_numbers)
    return transposed_numbers.reshape(-1).view(np.uint8)


def bias_rows(inner_bias: Bytes, width: int) -> list[Bytes]:
    """The biases of gate and up [w], in bytes, from those of both in turn [2w]."""
    biases = inner_bias.view(np.uint32).reshape(width, 2)
    return [np.ascontiguousarray(biases[:, odd]).view(np.uint8) for odd in (0, 1)]


def transpose(matrix: Any, target: Any) -> None:
    """Writes a matrix [m, n] to `target` [n, m]. Both are NumPy's or both torch's.

    A band of rows at a time stays in the caches. A matrix of 2880 x 2880 took a fifth of the time.
    """
    for begin in range(0, len(matrix), BAND):
        target[:, begin : begin + BAND] = matrix[begin : begin + BAND].T
