"""The codes, scales and offsets of weights in blocks.

A row of a type of `core.weight_types.BLOCK_TYPES` is stored in blocks. Those of GGUF files have the layout of
ggml's structs: `block_q4_K` and so on. Their numbers are those that the library `gguf` computes, to the bit.
`pack_groups` writes the others. `csrc/blocks.h` reads the same.

Question: How are the numbers of a GGUF block computed?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moesaic.core.weight_types import BLOCK_TYPES, INTEGER_GROUP_TYPES, NVFP4_TYPES, QUANTIZATIONS
from moesaic.kernels import small_blocks
from moesaic.kernels.quantized_layout import TABLES, Bytes, Floats
from moesaic.kernels.small_blocks import Parts, read_half

IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
).view(np.uint8)
"""What the codes of IQ4_NL and IQ4_XS stand for, as codes of int8."""


def decode_rows(dtype: str, stored_rows: Bytes) -> Parts:
    """The codes, scales and offsets of rows [rows, row_bytes] of a type of BLOCK_TYPES."""
    blocks = np.ascontiguousarray(stored_rows).reshape(-1, BLOCK_TYPES[dtype].size)
    codes, scales, offsets = READERS[dtype](blocks)
    rows = len(stored_rows)
    return (
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if offsets is None else offsets.reshape(rows, -1),
    )


def decode_conversion(dtype: str, stored_rows: Bytes) -> Parts:
    """Returns what `decode_rows` does, with codes and offsets of the type of `BlockType.conversion`."""
    codes, scales, offsets = decode_rows(dtype, stored_rows)
    if READERS[dtype] is not _read_int4:
        return codes, scales, offsets
    block = BLOCK_TYPES[dtype]
    zeros = (stored_rows.reshape(len(stored_rows), -1, block.size)[:, :, 0] & np.uint8(15)).repeat(
        block.numbers // block.group, axis=1
    )
    # A scale has so few bits that the product is exact.
    return codes + zeros.repeat(block.group, axis=1), scales, -(scales * zeros)


def decode_as(kind: str, dtype: str, stored_rows: Bytes) -> Parts:
    """Returns what `decode_conversion` does, with codes, scales and offsets of another type of QUANTIZATIONS.

    kind: what `core.weight_types.choose_common_type` returns for `dtype` and others. Each product with a
    scale is exact, since scales of blocks have few bits.
    """
    codes, scales, offsets = decode_conversion(dtype, stored_rows)
    source, target = QUANTIZATIONS[BLOCK_TYPES[dtype].conversion], QUANTIZATIONS[kind]
    repeats = BLOCK_TYPES[dtype].group // target.group
    scales = scales.repeat(repeats, axis=1)
    if offsets is not None:
        return codes, scales, offsets.repeat(repeats, axis=1)
    if source == target:
        return codes, scales, None
    factor = 2 if source.values == "e2m1" else 1  # whose numbers are halves
    values, scales = (TABLES[source.values] * factor)[codes].astype(np.int16), scales / np.float32(factor)
    if not target.offset:
        return values.astype(np.int8).view(np.uint8), scales, None
    least = values.min(initial=0)
    return (values - least).astype(np.uint8), scales, scales * np.float32(least)


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
    return blocks[:, 2:], read_half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return _unpack_16(blocks[:, 2:]), read_half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _unpack_16(blocks[:, 4:]), read_half(blocks, 0), read_half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    codes = _unpack_16(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    # Q5_0 has the numbers -16 to 15 as codes 0 to 31.
    return (codes.view(np.int8) - np.int8(16)).view(np.uint8), read_half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _unpack_16(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes, read_half(blocks, 0), read_half(blocks, 2)


def _iq4_nl(blocks: Bytes) -> Parts:
    return IQ4[_unpack_16(blocks[:, 2:])], read_half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    """Each 32 numbers have a scale of six bits, of which four are together and two with those of others."""
    low = blocks[:, 4:8, None] >> np.array([0, 4], dtype=np.uint8) & np.uint8(15)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = low.reshape(-1, 8).astype(np.float32) + 16 * high.astype(np.float32) - 32
    return IQ4[_unpack_16(blocks[:, 8:])], read_half(blocks, 0) * scales, None


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
    return read_half(blocks, 0) * scales, -(read_half(blocks, 2) * minima)


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
    scales = read_half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    # Q6_K has the numbers -32 to 31 as codes 0 to 63.
    return (codes.view(np.int8) - np.int8(32)).view(np.uint8), scales, None


def _q2_k(blocks: Bytes) -> Parts:
    """Each 16 numbers have a scale and an offset of four bits, times two numbers of the block."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = blocks[:, 16:80].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    scales = read_half(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    offsets = -(read_half(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32))
    return codes.reshape(len(blocks), -1), scales, offsets


def _q3_k(blocks: Bytes) -> Parts:
    """Each 16 numbers have a scale of six bits. The third bit of all numbers is in the first 32 bytes."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(len(blocks), -1)
    bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = low | bits.reshape(len(blocks), -1) << np.uint8(2)
    halves, high = blocks[:, 96:104], blocks[:, 104:108]
    low_bits = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=1)
    high_bits = (high[:, None, :] >> shifts & np.uint8(3)).reshape(len(blocks), -1)
    factors = (low_bits | high_bits << np.uint8(4)).astype(np.float32) - 32
    # Q3_K has the numbers -4 to 3 as codes 0 to 7.
    return (codes.view(np.int8) - np.int8(4)).view(np.uint8), read_half(blocks, 108) * factors, None


BF16_SCALE = 0x80
"""The bit of the first byte of a group that says that its scale is bf16."""
OFFSET_GROUP = "int8_offset_g128"
"""The type of groups with a zero point of eight bits and a float32 scale."""
GROUP_HEADS = {name: 5 if name == OFFSET_GROUP else 3 for name in INTEGER_GROUP_TYPES}
"""Type -> bytes of a group before its codes."""


def _group_scales(blocks: Bytes) -> Floats:
    """The scale of a group, [n, 1]."""
    wide = np.ascontiguousarray(blocks[:, 1:3]).view("<u2").astype(np.uint32) << np.uint32(16)
    return np.where(blocks[:, :1] & BF16_SCALE, wide.view(np.float32), read_half(blocks, 1))


def _read_int4(blocks: Bytes) -> Parts:
    packed_codes = blocks[:, 3:]
    codes = np.stack([packed_codes & np.uint8(15), packed_codes >> np.uint8(4)], axis=2)
    codes = codes.reshape(len(blocks), -1) - (blocks[:, :1] & np.uint8(15))
    return codes, _group_scales(blocks).repeat(codes.shape[1] // 32, axis=1), None


def _read_int8(blocks: Bytes) -> Parts:
    codes = blocks[:, 3:]
    return codes, _group_scales(blocks).repeat(codes.shape[1] // 32, axis=1), None


def _float_scales(blocks: Bytes) -> Floats:
    """The scale of a group of OFFSET_GROUP, [n, 1]."""
    return np.ascontiguousarray(blocks[:, 1:5]).view("<f4")


def _read_int8_offset(blocks: Bytes) -> Parts:
    codes, scales = blocks[:, 5:], _float_scales(blocks)
    offsets = -(scales * blocks[:, :1].astype(np.float32))
    return codes, scales.repeat(codes.shape[1] // 32, axis=1), offsets.repeat(codes.shape[1] // 32, axis=1)


def pack_groups(dtype: str, packed_codes: Bytes, scales: Floats, zeros: Bytes | int = 0) -> Bytes:
    """The rows of a type of INTEGER_GROUP_TYPES, [rows, row_bytes].

    packed_codes: [rows, bytes]; of "int4", two a byte with the first in the low half. scales: [rows, groups],
    where groups are as large as those of `dtype`, or some times larger; each is a number of float16 or bf16,
    but for OFFSET_GROUP. zeros: zero points, [rows, groups] or one for all.
    """
    size, head = BLOCK_TYPES[dtype].size, GROUP_HEADS[dtype]
    rows, heads = len(packed_codes), _pack_heads(dtype, scales, zeros)
    blocks = np.empty((rows, packed_codes.shape[1] // (size - head), size), dtype=np.uint8)
    blocks[:, :, :head] = heads.repeat(blocks.shape[1] // scales.shape[1], axis=1)
    blocks[:, :, head:] = packed_codes.reshape(rows, -1, size - head)
    return blocks.reshape(rows, -1)


def _pack_heads(dtype: str, scales: Floats, zeros: Bytes | int) -> Bytes:
    """What groups have before their codes, [rows, groups, bytes]."""
    zero_points, scales = np.broadcast_to(np.uint8(zeros), scales.shape), np.ascontiguousarray(scales)
    if dtype == OFFSET_GROUP:
        first_bytes, scale_bits = zero_points, scales.astype("<f4")
    else:
        with np.errstate(over="ignore"):  # of scales that only bf16 holds
            halves = scales.astype("<f2")
        in_bf16 = halves.astype(np.float32) != scales
        upper_bits = (scales.view(np.uint32) >> np.uint32(16)).astype("<u2")
        first_bytes = in_bf16 * np.uint8(BF16_SCALE) | zero_points
        scale_bits = np.where(in_bf16, upper_bits, halves.view("<u2")).astype("<u2")
    scale_bytes = scale_bits.view(np.uint8).reshape(*scales.shape, -1)
    return np.concatenate([first_bytes[:, :, None], scale_bytes], axis=2)


E2M1 = (TABLES["e2m1"] * 2).astype(np.int8).view(np.uint8)
"""Twice what the codes of NVFP4 stand for, as codes of int8."""
MOST_E2M1 = np.float32(12)
"""The largest number of E2M1, doubled."""


def _nvfp4_scales(blocks: Bytes) -> Floats:
    """The scales of each 16 doubled numbers, [n, groups]. The factor of a block divides if it is negative."""
    factors, scales = _nvfp4_factors(blocks), TABLES["e4m3"][blocks[:, 4 : _nvfp4_head(blocks)]]
    scales = np.where(factors < 0, scales / np.abs(factors), scales * factors)
    return scales * np.float32(0.5)


def _nvfp4_factors(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, :4]).view("<f4")


def _nvfp4_head(blocks: Bytes) -> int:
    """Bytes of a block before its codes. Each 16 numbers have a byte for their scale and eight for codes."""
    size: int = blocks.shape[1]
    return 4 + (size - 4) // 9


def _read_nvfp4(blocks: Bytes) -> Parts:
    codes = blocks[:, _nvfp4_head(blocks) :]
    numbers = np.stack([E2M1[codes & np.uint8(15)], E2M1[codes >> np.uint8(4)]], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return numbers.reshape(len(blocks), -1), _nvfp4_scales(blocks), None


def pack_nvfp4(dtype: str, packed_codes: Bytes, scales: Bytes, factor: float) -> Bytes:
    """The rows of a type of NVFP4_TYPES, [rows, row_bytes].

    packed_codes: [rows, bytes], two a byte with the first in the low half. scales: [rows, groups] in E4M3.
    factor: what they are multiplied by, or divided by its magnitude if it is negative.
    """
    numbers, rows = BLOCK_TYPES[dtype].numbers, len(packed_codes)
    parts = scales.reshape(rows, -1, numbers // 16), packed_codes.reshape(rows, -1, numbers // 2)
    factors = np.broadcast_to(np.array([factor], "<f4").view(np.uint8), (*parts[0].shape[:2], 4))
    return np.concatenate([factors, *parts], axis=2).reshape(rows, -1)


READERS: dict[str, Callable[[Bytes], Parts]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4_e8m0": _mxfp4, **small_blocks.READERS,
    "int4_g128": _read_int4, "int4_g64": _read_int4, "int4_g32": _read_int4, "int8_g128": _read_int8,
    OFFSET_GROUP: _read_int8_offset, **dict.fromkeys(NVFP4_TYPES, _read_nvfp4),
}  # fmt: skip
"""Type -> what reads blocks [n, size]: codes [n, numbers], scales and offsets [n, groups]."""
SCALES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), **small_blocks.SCALES,
    **dict.fromkeys((name for name in INTEGER_GROUP_TYPES if name != OFFSET_GROUP), (1,)),
}  # fmt: skip
"""Type -> the bytes of a block at which its float16 numbers begin; that of a group may be bf16. MXFP4 has an
exponent instead, and OFFSET_GROUP a float32. IQ1_M has four bits of it in each two bytes from there."""
MOST_EXPONENT = 252
"""The largest exponent of MXFP4 with which every code is a finite float32."""
VALUES = {
    "q4_0": "int4",
    "q4_1": "uint4",
    "q4_k": "uint4",
    "q5_1": "uint8",
    "q5_k": "uint8",
    "q2_k": "uint8",
    OFFSET_GROUP: "uint8",
    "mxfp4_e8m0": "e2m1",
}
"""Type -> what its codes mean, a key of `quantized_layout.TABLES`, where that is not "int8"."""


def find_not_finite(dtype: str, stored_rows: Bytes) -> float | None:
    """A number of a block that makes numbers NaN or infinite, or None. Codes are not read."""
    blocks = stored_rows.reshape(-1, BLOCK_TYPES[dtype].size)
    if dtype == "mxfp4_e8m0":
        largest = int(blocks[:, 0].max(initial=0))
        return None if largest <= MOST_EXPONENT else float("nan" if largest == 255 else "inf")
    if dtype in NVFP4_TYPES:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scales = _nvfp4_scales(blocks)
            return next(iter(scales[~np.isfinite(scales * MOST_E2M1)].tolist()), None)
    if dtype in INTEGER_GROUP_TYPES:
        scales = _float_scales(blocks) if dtype == OFFSET_GROUP else _group_scales(blocks)
        largest_code = np.float32(255 if dtype == OFFSET_GROUP else 128)
        with np.errstate(over="ignore"):
            return next(iter(scales[~np.isfinite(scales * largest_code)].tolist()), None)
    if dtype == "iq1_m":
        scales = small_blocks.read_scattered_half(blocks)
        return next(iter(scales[~np.isfinite(scales)].tolist()), None)
    for offset in SCALES[dtype]:
        # An exponent of float16 whose bits are all set means NaN or infinity.
        damage = blocks[blocks[:, offset + 1] & 0x7C == 0x7C]
        if len(damage):
            return float(read_half(damage, offset)[0, 0])
    return None


def dequantize(dtype: str, stored_rows: Bytes) -> Floats:
    """The numbers [rows, columns] of rows [rows, row_bytes] of a type of BLOCK_TYPES."""
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged blocks
        codes, scales, offsets = decode_rows(dtype, stored_rows)
        numbers = TABLES[VALUES.get(dtype, "int8")][codes].reshape(*scales.shape, BLOCK_TYPES[dtype].group)
        numbers *= scales[:, :, None]
        if offsets is not None:
            numbers += offsets[:, :, None]
    return numbers.reshape(len(stored_rows), -1)
