"""Quantised matrices in the layout that the kernels read, and back. `csrc/quantized.h` describes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.weight_types import BLOCK, QUANTIZATIONS, Quantization

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
_TABLES: dict[str, list[float]] = {
    "int4": [float(value - 8) for value in range(16)],
    "uint4": [float(value) for value in range(16)],
    "e2m1": [*_E2M1, *(-value for value in _E2M1)],
    "int8": [float(np.int8(np.uint8(code))) for code in range(256)],
    "uint8": [float(code) for code in range(256)],
}


def _e4m3() -> list[float]:
    """The value of each byte; 0x7f and 0xff are NaN."""
    table = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        table.append((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)
    table[127] = float("nan")
    return [*table, *(-value for value in table)]


_TABLES["e4m3"] = _e4m3()
TABLES = {name: np.array(table, dtype=np.float32) for name, table in _TABLES.items()}
"""Values of a type -> the value of each code."""


def pack(
    dtype: str, codes: Bytes, scales: Floats, offsets: Floats | None = None, output: Bytes | None = None
) -> Bytes:
    """The stored rows [rows, row_bytes], in `output` if that is given.

    dtype: a key of QUANTIZATIONS. codes [rows, columns], one a byte. scales and offsets [rows, groups].
    """
    kind = QUANTIZATIONS[dtype]
    rows, columns = codes.shape
    stored_rows = np.empty((rows, kind.row_bytes(columns)), dtype=np.uint8) if output is None else output
    heads = [scales] if offsets is None else [scales, offsets]
    offset = 0
    for begin in range(0, columns, BLOCK):
        block = codes[:, begin : begin + BLOCK]
        first, groups = begin // kind.group, -(-block.shape[1] // kind.group)
        for head in heads:
            part = np.ascontiguousarray(head[:, first : first + groups], dtype="<f4").view(np.uint8)
            stored_rows[:, offset : offset + part.shape[1]] = part
            offset += part.shape[1]
        if block.shape[1] % kind.group:
            block = np.pad(block, ((0, 0), (0, groups * kind.group - block.shape[1])))
        block = block if kind.bits == 8 else _nibbles(block)
        stored_rows[:, offset : offset + block.shape[1]] = block
        offset += block.shape[1]
    return stored_rows


def dequantize(dtype: str, stored_rows: Bytes, columns: int) -> Floats:
    """The numbers [rows, columns] of stored rows [rows, row_bytes]."""
    kind = QUANTIZATIONS[dtype]
    numbers = np.empty((len(stored_rows), columns), dtype=np.float32)
    offset = 0
    for begin in range(0, columns, BLOCK):
        count = min(BLOCK, columns - begin)
        size = kind.row_bytes(count)
        numbers[:, begin : begin + count] = _block(kind, stored_rows[:, offset : offset + size], count)
        offset += size
    return numbers


def _block(kind: Quantization, block_bytes: Bytes, count: int) -> Floats:
    """The numbers of one block of every row."""
    groups, rows = -(-count // kind.group), len(block_bytes)
    heads = np.ascontiguousarray(block_bytes[:, : 4 * groups * (1 + kind.offset)]).view("<f4")
    codes: Any = block_bytes[:, 4 * groups * (1 + kind.offset) :]
    if kind.bits == 4:
        codes = _codes(codes)
    values = TABLES[kind.values][codes].reshape(rows, groups, kind.group)
    values *= heads[:, :groups, None]
    if kind.offset:
        values += heads[:, groups:, None]
    numbers: Floats = values.reshape(rows, -1)[:, :count]
    return numbers


def _nibbles(codes: Bytes) -> Bytes:
    """Two codes a byte, 32 codes in 16 bytes."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    packed_codes: Bytes = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(len(codes), -1)
    return packed_codes


def _codes(packed_codes: Bytes) -> Any:
    """The input of `_nibbles`."""
    pairs = packed_codes.reshape(len(packed_codes), -1, 1, 16)
    return np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=2).reshape(len(packed_codes), -1)
