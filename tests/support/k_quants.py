"""Writes blocks of Q2_K to Q6_K and of the IQ types, which the library `gguf` reads but does not write.

Each group gets the scale and minimum of its own range, rounded to the bits that the format has. Blocks of IQ1
to IQ3 are random. Only their scales are as large as the numbers say.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def _halves(values: Floats) -> tuple[Bytes, Floats]:
    """float16 numbers [n] as bytes [n, 2], and what they are."""
    half = values.astype("<f2")
    return half.reshape(-1, 1).view(np.uint8), half.astype(np.float32)


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros(np.broadcast(part, whole).shape, np.float32), where=whole != 0)


def _with_minima(rows: Floats, bits: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """d, dmin [n, 2], the packed scales [n, 12] and codes [n, 256] of Q4_K and Q5_K."""
    groups = rows.reshape(-1, 8, 32)
    low, high = np.minimum(groups.min(2), 0), groups.max(2)
    most = 2**bits - 1
    d, d_is = _halves(((high - low) / most).max(1) / 63)
    dmin, dmin_is = _halves((-low).max(1) / 63)
    scales = np.clip(np.round(_ratio((high - low) / most, d_is[:, None])), 0, 63).astype(np.uint8)
    minima = np.clip(np.round(_ratio(-low, dmin_is[:, None])), 0, 63).astype(np.uint8)
    step, least = d_is[:, None] * scales, dmin_is[:, None] * minima
    codes = np.clip(np.round(_ratio(groups + least[..., None], step[..., None])), 0, most).astype(np.uint8)
    packed = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4) << 6,
            minima[:, :4] | (minima[:, 4:] >> 4) << 6,
            (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return d, dmin, packed, codes.reshape(-1, 256)


def _nibbles(codes: Bytes) -> Bytes:
    """Codes of four bits [n, 256] in 128 bytes: 32 low halves, then the 32 high halves of the same bytes."""
    parts: Any = codes.reshape(-1, 4, 2, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(-1, 128)


def q4_k(rows: Floats) -> Bytes:
    d, dmin, scales, codes = _with_minima(rows, 4)
    return np.concatenate([d, dmin, scales, _nibbles(codes)], axis=1)


def q5_k(rows: Floats) -> Bytes:
    d, dmin, scales, codes = _with_minima(rows, 5)
    high = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    return np.concatenate([d, dmin, scales, high.sum(1, dtype=np.uint8), _nibbles(codes & 15)], axis=1)


def q6_k(rows: Floats) -> Bytes:
    groups = rows.reshape(-1, 16, 16)
    own = np.abs(groups).max(2) / 31
    d, d_is = _halves(own.max(1) / 127)
    scales = np.clip(np.round(_ratio(own, d_is[:, None])), 0, 127).astype(np.int8)
    step = d_is[:, None] * scales
    codes = (np.clip(np.round(_ratio(groups, step[..., None])), -32, 31) + 32).astype(np.uint8)
    halves: Any = codes.reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] & 15 | (halves[:, :, 1] & 15) << 4).reshape(-1, 128)
    quarters: Any = (codes >> 4).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = quarters.sum(2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d], axis=1)


def _two_bits(codes: Bytes) -> Bytes:
    """Codes of two bits [n, 256] in 64 bytes: 32 numbers of four in a row in the same bytes."""
    quarters: Any = codes.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return quarters.sum(2, dtype=np.uint8).reshape(-1, 64)


def q2_k(rows: Floats) -> Bytes:
    groups = rows.reshape(-1, 16, 16)
    low, high = np.minimum(groups.min(2), 0), groups.max(2)
    d, d_is = _halves(((high - low) / 3).max(1) / 15)
    dmin, dmin_is = _halves((-low).max(1) / 15)
    scales = np.clip(np.round(_ratio((high - low) / 3, d_is[:, None])), 0, 15).astype(np.uint8)
    minima = np.clip(np.round(_ratio(-low, dmin_is[:, None])), 0, 15).astype(np.uint8)
    step, least = d_is[:, None] * scales, dmin_is[:, None] * minima
    codes = np.clip(np.round(_ratio(groups + least[..., None], step[..., None])), 0, 3).astype(np.uint8)
    return np.concatenate([scales | minima << 4, _two_bits(codes.reshape(-1, 256)), d, dmin], axis=1)


def q3_k(rows: Floats) -> Bytes:
    groups = rows.reshape(-1, 16, 16)
    own = np.abs(groups).max(2) / 3
    d, d_is = _halves(own.max(1) / 31)
    factors = np.clip(np.round(_ratio(own, d_is[:, None])), 0, 31)
    step = d_is[:, None] * factors
    codes = (np.clip(np.round(_ratio(groups, step[..., None])), -4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    third_bits: Any = (codes >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    six_bits = (factors + 32).astype(np.uint8)
    upper: Any = (six_bits >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    packed = np.concatenate(
        [six_bits[:, :8] & 15 | (six_bits[:, 8:] & 15) << 4, upper.sum(1, dtype=np.uint8)], axis=1
    )
    return np.concatenate([third_bits.sum(1, dtype=np.uint8), _two_bits(codes & 3), packed, d], axis=1)


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


def _nearest_codes(groups: Floats, step: Floats) -> Bytes:
    """Codes of IQ4 [n, 8, 16]: those of 32 numbers [n, 8, 32] in the halves of 16 bytes."""
    values = _ratio(groups, step[..., None])
    codes = np.abs(values[..., None] - IQ4).argmin(3).astype(np.uint8)
    return codes[:, :, :16] | codes[:, :, 16:] << 4


def iq4_nl(rows: Floats) -> Bytes:
    groups = rows.reshape(-1, 8, 32)
    d, step = _halves(np.abs(groups).max(2).reshape(-1) / 113)
    codes = _nearest_codes(groups, step.reshape(-1, 8))
    return np.concatenate([d.reshape(-1, 8, 2), codes], axis=2).reshape(len(groups), -1)


def iq4_xs(rows: Floats) -> Bytes:
    groups = rows.reshape(-1, 8, 32)
    own = np.abs(groups).max(2) / 113
    d, d_is = _halves(own.max(1) / 31)
    factors = np.clip(np.round(_ratio(own, d_is[:, None])), 0, 31)
    codes = _nearest_codes(groups, d_is[:, None] * factors).reshape(-1, 128)
    six_bits = (factors + 32).astype(np.uint16)
    upper = ((six_bits >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(1, dtype=np.uint16)
    lower = (six_bits & 15).astype(np.uint8).reshape(-1, 4, 2)
    scales = lower[:, :, 0] | lower[:, :, 1] << 4
    return np.concatenate([d, upper.astype("<u2").reshape(-1, 1).view(np.uint8), scales, codes], axis=1)


def put_scales(kind: str, blocks: Bytes, place: int, numbers: Any) -> None:
    """Writes numbers [n] in float16 at a byte of blocks [n, size]. IQ1_M has one in parts of four bits."""
    halves = np.asarray(numbers).astype("<f2").reshape(-1, 1)
    if kind != "IQ1_M":
        blocks[:, place : place + 2] = halves.view(np.uint8)
        return
    for part in range(4):
        bits = (halves.view("<u2")[:, 0] >> 4 * part & 15).astype(np.uint8)
        blocks[:, place + 2 * part + 1] = blocks[:, place + 2 * part + 1] & 15 | bits << 4


PLACES = {**dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 0), "IQ1_M": 48}
"""Type -> the byte of a block at which its scale begins."""


def draw_blocks(kind: str, rows: Floats) -> Bytes:
    """Random blocks whose numbers are as large as those of rows [n, 256]. Equal rows have equal blocks."""
    number = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(zlib.crc32(rows.tobytes()))
    blocks = rng.integers(0, 256, (len(rows), gguf.GGML_QUANT_SIZES[number][1])).astype(np.uint8)
    put_scales(kind, blocks, PLACES[kind], np.ones(len(rows)))
    sizes, own = (np.sqrt(np.square(x).mean(1)) for x in (rows, gguf.dequantize(blocks, number)))
    put_scales(kind, blocks, PLACES[kind], sizes / own)
    return blocks


WRITERS = {
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
    **{kind: partial(draw_blocks, kind) for kind in PLACES},
}  # fmt: skip
