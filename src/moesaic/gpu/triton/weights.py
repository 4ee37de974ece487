"""Tiles of weights as numbers: floats as they are, quantised ones dequantised to float32 in registers.

`csrc/quantized.h` describes how a quantised row is stored. Codes become numbers by their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.core.weight_types import QUANTIZATIONS

FLOATS = ("float32", "bfloat16", "float16")
KINDS = (*FLOATS, *QUANTIZATIONS)
"""Types of weights. A kernel is told one by its index."""


def step_of(kind: str) -> int:
    """Numbers of a row that a product takes at a time. Those in float32 fill twice the shared memory."""
    return 64 if kind in ("bfloat16", "float16") else 32


@triton.jit
def _apply_sign(bits, sign):
    """float32 of the bits of its magnitude and its sign, 0 or 1."""
    return (bits | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code):
    """float32 of OCP's 8-bit floats with 4 bits of exponent. 0x7f and 0xff are NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = ((exponent + 120) << 23) | (mantissa << 20)
    small = (mantissa.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(exponent > 0, normal, small)
    bits = tl.where((code & 127) == 127, 0x7FC00000, bits)
    return _apply_sign(bits, code >> 7)


@triton.jit
def _e2m1(code):
    """float32 of OCP's 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent > 0, normal, mantissa * 0x3F000000)
    return _apply_sign(bits, code >> 3)


@triton.jit
def address(number, IS_ALIGNED: tl.constexpr):
    """The address of bytes from its number. IS_ALIGNED: it is a multiple of 16, as wide loads need it."""
    first = number.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(first, 16) if IS_ALIGNED else first


@triton.jit
def _factors(pointers, number, count, columns, valid_lines, GROUP: tl.constexpr, STEP: tl.constexpr):
    """What the groups of a tile have beside their codes: [lines, 1] of one group, [lines, STEP] of more.

    pointers: [lines, 1] of the float32 numbers of a block. number: the tile's first number in the block,
    which has `count` of them. valid_lines: [lines, 1] whether a line is one.
    """
    group, begin = number // GROUP, (number + tl.arange(0, 1))[None, :]
    if STEP <= GROUP:
        return tl.load(pointers + group, mask=valid_lines & (begin < count), other=0.0)
    elif STEP == 2 * GROUP:
        first = tl.load(pointers + group, mask=valid_lines & (begin < count), other=0.0)
        second = tl.load(pointers + group + 1, mask=valid_lines & (begin + GROUP < count), other=0.0)
        return tl.where((columns < GROUP)[None, :], first, second)
    else:
        mask = valid_lines & (number + columns < count)[None, :]
        return tl.load(pointers + (group + columns // GROUP)[None, :], mask=mask, other=0.0)


@triton.jit
def _quantized_tile(
    base,
    lines,
    count,
    step,
    size,
    line,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    STEP: tl.constexpr,
):
    columns, valid_lines = tl.arange(0, STEP), (lines < count)[:, None]
    mask = valid_lines & (step + columns < size)[None, :]
    # Numbers come in blocks of 1024: float32 scales, float32 offsets if there are any, then codes. A tile has
    # numbers of one block, so what follows says nothing of single numbers, and loads can be wide.
    number = step % 1024
    in_block = tl.minimum(size - (step - number), 1024)
    groups = (in_block + GROUP - 1) // GROUP
    of_lines = lines[:, None].to(tl.int64) * (line // 4 * 4)  # every row has a multiple of 4 bytes
    first = base + (of_lines + step // 1024 * BLOCK_BYTES)
    scales = first.to(tl.pointer_type(tl.float32))
    scale = _factors(scales, number, in_block, columns, valid_lines, GROUP, STEP)
    codes = first + 4 * groups * (1 + OFFSET)
    EIGHT: tl.constexpr = (VALUES == "e4m3") or (VALUES == "int8") or (VALUES == "uint8")
    if EIGHT:
        code = tl.load(codes + (number + columns)[None, :], mask=mask, other=0).to(tl.int32)
    else:  # 32 codes lie in 16 bytes, the second half of them in the upper bits
        byte = number // 32 * 16 + (columns // 32 * 16 + columns % 16)
        packed_codes = tl.load(codes + byte[None, :], mask=mask, other=0).to(tl.int32)
        code = (packed_codes >> (columns % 32 // 16 * 4)[None, :]) & 15
    if VALUES == "e4m3":
        value = _e4m3(code)
    elif VALUES == "e2m1":
        value = _e2m1(code)
    elif VALUES == "int8":
        value = tl.where(code > 127, code - 256, code).to(tl.float32)
    elif VALUES == "int4":
        value = (code - 8).to(tl.float32)
    else:
        value = code.to(tl.float32)
    number_of = value * scale
    if OFFSET:
        number_of += _factors(scales + groups, number, in_block, columns, valid_lines, GROUP, STEP)
    return tl.where(mask, number_of, 0.0)


@triton.jit
def weight_tile(base, lines, count, step, size, line, KIND: tl.constexpr, STEP: tl.constexpr):
    """[lines, STEP] numbers `step` and on of some rows of a matrix [count, size], 0 beyond its end.

    base: address of the matrix, of bytes. line: bytes of a row. step: a multiple of STEP.
    """
    if KIND == "fp8":
        return _quantized_tile(base, lines, count, step, size, line, "e4m3", 128, 0, 1056, STEP)
    elif KIND == "int8":
        return _quantized_tile(base, lines, count, step, size, line, "int8", 32, 0, 1152, STEP)
    elif KIND == "int8_offset":
        return _quantized_tile(base, lines, count, step, size, line, "uint8", 32, 1, 1280, STEP)
    elif KIND == "int4":
        return _quantized_tile(base, lines, count, step, size, line, "int4", 32, 0, 640, STEP)
    elif KIND == "int4_offset":
        return _quantized_tile(base, lines, count, step, size, line, "uint4", 32, 1, 768, STEP)
    elif KIND == "mxfp4":
        return _quantized_tile(base, lines, count, step, size, line, "e2m1", 32, 0, 640, STEP)
    elif KIND == "int8_16":
        return _quantized_tile(base, lines, count, step, size, line, "int8", 16, 0, 1280, STEP)
    elif KIND == "int8_16_offset":
        return _quantized_tile(base, lines, count, step, size, line, "uint8", 16, 1, 1536, STEP)
    else:
        inner = step + tl.arange(0, STEP)
        mask = (lines < count)[:, None] & (inner < size)[None, :]
        if KIND == "bfloat16":
            first = base.to(tl.pointer_type(tl.bfloat16)) + lines[:, None].to(tl.int64) * (line // 2)
        elif KIND == "float16":
            first = base.to(tl.pointer_type(tl.float16)) + lines[:, None].to(tl.int64) * (line // 2)
        else:
            first = base.to(tl.pointer_type(tl.float32)) + lines[:, None].to(tl.int64) * (line // 4)
        return tl.load(first + inner[None, :], mask=mask, other=0.0)
