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
def _signed(bits, sign):
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
    return _signed(bits, code >> 7)


@triton.jit
def _e2m1(code):
    """float32 of OCP's 4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent > 0, normal, mantissa * 0x3F000000)
    return _signed(bits, code >> 3)


@triton.jit
def address(number, ALIGNED: tl.constexpr):
    """The address of bytes from its number. ALIGNED: it is a multiple of 16, as wide loads need it."""
    first = number.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(first, 16) if ALIGNED else first


@triton.jit
def _factors(at, number, count, along, here, GROUP: tl.constexpr, STEP: tl.constexpr):
    """What the groups of a tile have beside their codes: [lines, 1] of one group, [lines, STEP] of more.

    at: [lines, 1] of the float32 numbers of a block. number: the tile's first number in the block, which has
    `count` of them. here: [lines, 1] whether a line is one.
    """
    group, begin = number // GROUP, (number + tl.arange(0, 1))[None, :]
    if STEP <= GROUP:
        return tl.load(at + group, mask=here & (begin < count), other=0.0)
    elif STEP == 2 * GROUP:
        first = tl.load(at + group, mask=here & (begin < count), other=0.0)
        second = tl.load(at + group + 1, mask=here & (begin + GROUP < count), other=0.0)
        return tl.where((along < GROUP)[None, :], first, second)
    else:
        inside = here & (number + along < count)[None, :]
        return tl.load(at + (group + along // GROUP)[None, :], mask=inside, other=0.0)


@triton.jit
def _quantized_tile(
    at,
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
    along, here = tl.arange(0, STEP), (lines < count)[:, None]
    inside = here & (step + along < size)[None, :]
    # Numbers come in blocks of 1024: float32 scales, float32 offsets if there are any, then codes. A tile has
    # numbers of one block, so what follows says nothing of single numbers, and loads can be wide.
    number = step % 1024
    in_block = tl.minimum(size - (step - number), 1024)
    groups = (in_block + GROUP - 1) // GROUP
    of_lines = lines[:, None].to(tl.int64) * (line // 4 * 4)  # every row has a multiple of 4 bytes
    first = at + (of_lines + step // 1024 * BLOCK_BYTES)
    scales = first.to(tl.pointer_type(tl.float32))
    scale = _factors(scales, number, in_block, along, here, GROUP, STEP)
    codes = first + 4 * groups * (1 + OFFSET)
    EIGHT: tl.constexpr = (VALUES == "e4m3") or (VALUES == "int8") or (VALUES == "uint8")
    if EIGHT:
        code = tl.load(codes + (number + along)[None, :], mask=inside, other=0).to(tl.int32)
    else:  # 32 codes lie in 16 bytes, the second half of them in the upper bits
        byte = number // 32 * 16 + (along // 32 * 16 + along % 16)
        both = tl.load(codes + byte[None, :], mask=inside, other=0).to(tl.int32)
        code = (both >> (along % 32 // 16 * 4)[None, :]) & 15
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
        number_of += _factors(scales + groups, number, in_block, along, here, GROUP, STEP)
    return tl.where(inside, number_of, 0.0)


@triton.jit
def weight_tile(at, lines, count, step, size, line, KIND: tl.constexpr, STEP: tl.constexpr):
    """[lines, STEP] numbers `step` and on of some rows of a matrix [count, size], 0 beyond its end.

    at: address of the matrix, of bytes. line: bytes of a row. step: a multiple of STEP.
    """
    if KIND == "fp8":
        return _quantized_tile(at, lines, count, step, size, line, "e4m3", 128, 0, 1056, STEP)
    elif KIND == "int8":
        return _quantized_tile(at, lines, count, step, size, line, "int8", 32, 0, 1152, STEP)
    elif KIND == "int8_offset":
        return _quantized_tile(at, lines, count, step, size, line, "uint8", 32, 1, 1280, STEP)
    elif KIND == "int4":
        return _quantized_tile(at, lines, count, step, size, line, "int4", 32, 0, 640, STEP)
    elif KIND == "int4_offset":
        return _quantized_tile(at, lines, count, step, size, line, "uint4", 32, 1, 768, STEP)
    elif KIND == "mxfp4":
        return _quantized_tile(at, lines, count, step, size, line, "e2m1", 32, 0, 640, STEP)
    elif KIND == "int8_16":
        return _quantized_tile(at, lines, count, step, size, line, "int8", 16, 0, 1280, STEP)
    else:
        inner = step + tl.arange(0, STEP)
        inside = (lines < count)[:, None] & (inner < size)[None, :]
        if KIND == "bfloat16":
            first = at.to(tl.pointer_type(tl.bfloat16)) + lines[:, None].to(tl.int64) * (line // 2)
        elif KIND == "float16":
            first = at.to(tl.pointer_type(tl.float16)) + lines[:, None].to(tl.int64) * (line // 2)
        else:
            first = at.to(tl.pointer_type(tl.float32)) + lines[:, None].to(tl.int64) * (line // 4)
        return tl.load(first + inner[None, :], mask=inside, other=0.0)
