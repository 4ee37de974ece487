"""Tiles of weights as numbers: floats as they are, quantised ones dequantised to float32 in registers.

`csrc/quantized.h` describes how a quantised row is stored. Codes become numbers by their bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moesaic.core.stored import QUANTIZED

FLOATS = ("float32", "bfloat16", "float16")
KINDS = (*FLOATS, *QUANTIZED)
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
    inner = step + tl.arange(0, STEP)
    inside = (lines < count)[:, None] & (inner < size)[None, :]
    # Numbers come in blocks of 1024: float32 scales, float32 offsets if there are any, then codes.
    number = inner % 1024
    in_block = tl.minimum(size - (inner - number), 1024)
    groups = (in_block + GROUP - 1) // GROUP
    block = (inner // 1024).to(tl.int64) * BLOCK_BYTES
    first = at + lines[:, None].to(tl.int64) * line + block[None, :]
    scales = first.to(tl.pointer_type(tl.float32)) + (number // GROUP)[None, :]
    scale = tl.load(scales, mask=inside, other=0.0)
    codes = first.to(tl.pointer_type(tl.uint8)) + (4 * groups * (1 + OFFSET))[None, :]
    EIGHT: tl.constexpr = (VALUES == "e4m3") or (VALUES == "int8") or (VALUES == "uint8")
    if EIGHT:
        code = tl.load(codes + number[None, :], mask=inside, other=0).to(tl.int32)
    else:  # 32 codes lie in 16 bytes, the second half of them in the upper bits
        byte = number // 32 * 16 + number % 16
        both = tl.load(codes + byte[None, :], mask=inside, other=0).to(tl.int32)
        code = (both >> (number % 32 // 16 * 4)[None, :]) & 15
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
        number_of += tl.load(scales + groups[None, :], mask=inside, other=0.0)
    return tl.where(inside, number_of, 0.0)


@triton.jit
def weight_tile(at, lines, count, step, size, line, KIND: tl.constexpr, STEP: tl.constexpr):
    """[lines, STEP] numbers `step` and on of some rows of a matrix [count, size], 0 beyond its end.

    at: address of the matrix. line: bytes of a row.
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
        first = at + lines[:, None].to(tl.int64) * line
        if KIND == "bfloat16":
            return tl.load(first.to(tl.pointer_type(tl.bfloat16)) + inner[None, :], mask=inside, other=0.0)
        elif KIND == "float16":
            return tl.load(first.to(tl.pointer_type(tl.float16)) + inner[None, :], mask=inside, other=0.0)
        else:
            return tl.load(first.to(tl.pointer_type(tl.float32)) + inner[None, :], mask=inside, other=0.0)
