"""The types of tensors in GGUF files, and the codes, scales and offsets of quantised ones.

A row of a quantised type is stored in blocks, whose layout is that of ggml's structs: `block_q4_K` and so on.
The numbers are those that the library `gguf` computes, to the bit. Only numpy is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.kernels.quantized_layout import Bytes, Floats

NUMBERS = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of plain numbers -> bytes of one."""
NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Number in a file -> name of the type."""

IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
).view(np.uint8)
"""What the codes of IQ4_NL and IQ4_XS stand for, as codes of int8."""

Parts = tuple[Bytes, Floats, Floats | None]
"""Codes [rows, columns], one a byte; scales and offsets [rows, groups]."""


@dataclass(frozen=True)
class Block:
    """A quantised type."""

    numbers: int
    """Numbers of a block."""
    size: int
    """Bytes of a block."""
    dtype: str
    """The type of core.weight_types that holds the same numbers."""
    read: Callable[[Bytes], Parts]
    """Called with blocks [n, size]. Returns codes [n, numbers], scales and offsets [n, groups]."""


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row. Raises ValueError if it is no whole number of blocks."""
    if kind in NUMBERS:
        return columns * NUMBERS[kind]
    block = BLOCKS[kind]
    if columns % block.numbers:
        raise ValueError(f"rows of {columns} {kind} numbers; allowed: multiples of {block.numbers}")
    return columns // block.numbers * block.size


def decode_rows(kind: str, stored_rows: Bytes) -> Parts:
    """The codes, scales and offsets of rows [rows, row_bytes] of a quantised type."""
    block = BLOCKS[kind]
    codes, scales, offsets = block.read(np.ascontiguousarray(stored_rows).reshape(-1, block.size))
    rows = len(stored_rows)
    return (
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if offsets is None else offsets.reshape(rows, -1),
    )


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 number at byte `offset` of each block, as [n, 1] float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _unpack_16(packed_codes: Bytes) -> Bytes:
    """Codes of four bits of bytes [n, m]: first the low halves of 16 bytes, then their high halves."""
    parts = packed_codes.reshape(len(packed_codes), -1, 1, 16)
    codes: Bytes = np.concatenate([parts & np.uint8(15), parts >> np.uint8(4)], axis=2)
    return codes.reshape(len(packed_codes), -1)


def _fifth_bits(blocks: Bytes, offset: int) -> Bytes:
    """Bit i of the 32-bit word at byte `offset` of each block, as 16 or 0, in column i."""
    bits = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    fifth_bits: Bytes = bits << np.uint8(4)
    return fifth_bits


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:], _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return _unpack_16(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _unpack_16(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    codes = _unpack_16(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    # Q5_0 has the numbers -16 to 15 as codes 0 to 31.
    return (codes.view(np.int8) - np.int8(16)).view(np.uint8), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _unpack_16(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes, _half(blocks, 0), _half(blocks, 2)


def _iq4_nl(blocks: Bytes) -> Parts:
    return IQ4[_unpack_16(blocks[:, 2:])], _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    """Each 32 numbers have a scale of six bits, of which four are together and two with those of others."""
    low = blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8) & np.uint8(15)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = low.reshape(-1, 8).astype(np.float32) + 16 * high.astype(np.float32) - 32
    return IQ4[_unpack_16(blocks[:, 8:])], _half(blocks, 0) * scales, None


def _mxfp4(blocks: Bytes) -> Parts:
    # Exponent 255 stands for NaN. Its scale is NaN here, and such a matrix is refused.
    exponents = blocks[:, :1]
    number = exponents != 255
    powers = np.ldexp(np.float32(1), np.where(number, exponents, 127).astype(np.int32) - 127)
    return _unpack_16(blocks[:, 1:]), np.where(number, powers, np.float32(np.nan)), None


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and offset of each 32 numbers of Q4_K and Q5_K, [n, 8]: six bits times a number of the block."""
    packed_bits: Any = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = packed_bits[:, 0], packed_bits[:, 1], packed_bits[:, 2]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 2 & 48)], axis=1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _unpack_32(packed_codes: Bytes) -> Bytes:
    """Codes of four bits of bytes [n, m]: first the low halves of 32 bytes, then their high halves."""
    parts = packed_codes.reshape(len(packed_codes), -1, 1, 32)
    codes: Bytes = np.concatenate([parts & np.uint8(15), parts >> np.uint8(4)], axis=2)
    return codes.reshape(len(packed_codes), -1)


def _q4_k(blocks: Bytes) -> Parts:
    return _unpack_32(blocks[:, 16:]), *_scales_and_minima(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _unpack_32(blocks[:, 48:]) | bits.reshape(len(blocks), -1) << np.uint8(4)
    return codes, *_scales_and_minima(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    halves, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(len(blocks), -1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = low | (high >> shifts & np.uint8(3)).reshape(len(blocks), -1) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    # Q6_K has the numbers -32 to 31 as codes 0 to 63.
    return (codes.view(np.int8) - np.int8(32)).view(np.uint8), scales, None


BLOCKS = {
    "Q8_0": Block(32, 34, "int8", _q8_0),
    "Q4_0": Block(32, 18, "int4", _q4_0),
    "Q4_1": Block(32, 20, "int4_offset", _q4_1),
    "Q5_0": Block(32, 22, "int8", _q5_0),
    "Q5_1": Block(32, 24, "int8_offset", _q5_1),
    "IQ4_NL": Block(32, 18, "int8", _iq4_nl),
    "IQ4_XS": Block(256, 136, "int8", _iq4_xs),
    "Q4_K": Block(256, 144, "int4_offset", _q4_k),
    "Q5_K": Block(256, 176, "int8_offset", _q5_k),
    "Q6_K": Block(256, 210, "int8_16", _q6_k),
    "MXFP4": Block(32, 17, "mxfp4", _mxfp4),
}
"""The quantised types that are read."""
ALLOWED = (*NUMBERS, *BLOCKS)
