"""The codes and scales of GGUF's smallest types: those with entries of grids, and those of base three.

`csrc/small_blocks.h` reads the same. Numbers are those that the library `gguf` computes, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moesaic.kernels.grids import GRIDS
from moesaic.kernels.quantized_layout import Bytes, Floats

Parts = tuple[Bytes, Floats, Floats | None]
"""Codes [rows, columns], one a byte; scales and offsets [rows, groups]."""


def read_half(blocks: Bytes, offset: int) -> Floats:
    """The float16 number at byte `offset` of each block, as [n, 1] float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _words(blocks: Bytes, begin: int, end: int, dtype: str) -> Any:
    """Bytes `begin` to `end` of each block, as integers of another type."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype)


def _half_bytes(row_bytes: Bytes) -> Bytes:
    """The halves of each byte [n, m] -> [n, 2m], first the low one."""
    return np.stack([row_bytes & np.uint8(15), row_bytes >> np.uint8(4)], axis=2).reshape(len(row_bytes), -1)


def _even_signs(sevens: Any) -> Bytes:
    """Eight signs of which an even number is set. sevens: the first seven of them, in bits."""
    bits = sevens.astype(np.uint8)
    parity = np.bitwise_xor.reduce(np.unpackbits(bits[..., None], axis=-1), axis=-1)
    signs: Bytes = bits | parity << np.uint8(7)
    return signs


def _sign_entries(grid: str, indexes: Any, signs: Bytes) -> Bytes:
    """Codes [n, 256]: entries of a grid whose numbers are negative where bytes [n, 32] have a bit."""
    negative = np.unpackbits(signs.reshape(len(signs), -1), axis=1, bitorder="little")
    numbers = GRIDS[grid][indexes].reshape(len(signs), -1)
    codes: Bytes = np.where(negative, -numbers, numbers).view(np.uint8)
    return codes


def _odd_factors(scale: Floats, factors: Any) -> Floats:
    """The scale of a block times odd integers."""
    scales: Floats = scale * (2 * factors.astype(np.float32) + 1)
    return scales


def _iq2_xxs(blocks: Bytes) -> Parts:
    """A group has four indexes in four bytes, then four times seven signs and its factor in 32 bits."""
    groups = blocks[:, 2:].reshape(len(blocks), 8, 8)
    words = _words(blocks, 2, 66, "<u4")[:, 1::2]
    signs = _even_signs(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127)
    codes = _sign_entries("IQ2_XXS", groups[:, :, :4], signs)
    return codes, _odd_factors(read_half(blocks, 0) * np.float32(0.125), words >> 28), None


def _iq2_xs(blocks: Bytes) -> Parts:
    """An entry has an index of nine bits and seven signs."""
    words = _words(blocks, 2, 66, "<u2")
    codes = _sign_entries("IQ2_XS", words & 511, _even_signs(words >> 9))
    scale = read_half(blocks, 0) * np.float32(0.125)
    return codes, _odd_factors(scale, _half_bytes(blocks[:, 66:])), None


def _upper_bits(row_bytes: Bytes, bits: int) -> Any:
    """Each few bits of bytes [n, m], the lowest first, times 256 as integers [n, m * 8 / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = row_bytes[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(row_bytes), -1).astype(np.int64) << 8


def _iq2_s(blocks: Bytes) -> Parts:
    """Indexes have ten bits, of which two are in another place. Signs are stored whole."""
    codes = _sign_entries("IQ2_S", blocks[:, 2:34] | _upper_bits(blocks[:, 66:74], 2), blocks[:, 34:66])
    scale = read_half(blocks, 0) * np.float32(0.125)
    return codes, _odd_factors(scale, _half_bytes(blocks[:, 74:])), None


def _iq3_xxs(blocks: Bytes) -> Parts:
    words = _words(blocks, 66, 98, "<u4")
    signs = _even_signs(words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127)
    codes = _sign_entries("IQ3_XXS", blocks[:, 2:66], signs)
    return codes, _odd_factors(read_half(blocks, 0) * np.float32(0.25), words >> 28), None


def _iq3_s(blocks: Bytes) -> Parts:
    """Indexes have nine bits, of which one is in another place. Signs are stored whole."""
    codes = _sign_entries("IQ3_S", blocks[:, 2:66] | _upper_bits(blocks[:, 66:74], 1), blocks[:, 74:106])
    return codes, _odd_factors(read_half(blocks, 0), _half_bytes(blocks[:, 106:])), None


def _add_eighths(indexes: Any, is_negative: Any) -> Bytes:
    """Codes [n, 256] of IQ1, eight times entries of its grid, plus or minus one for each entry."""
    signs = np.where(is_negative, np.int8(-1), np.int8(1))[:, :, None]
    codes: Bytes = (GRIDS["IQ1"][indexes] * np.int8(8) + signs).reshape(len(indexes), -1).view(np.uint8)
    return codes


def _iq1_s(blocks: Bytes) -> Parts:
    """32 numbers share 16 bits: three upper bits of four indexes, a factor and the sign of an eighth."""
    words = _words(blocks, 34, 50, "<u2")
    upper_bits = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(len(blocks), -1)
    codes = _add_eighths(blocks[:, 2:34] | upper_bits.astype(np.int64) << 8, (words >> 15).repeat(4, axis=1))
    return codes, _odd_factors(read_half(blocks, 0) * np.float32(0.125), words >> 12 & 7), None


def read_scattered_half(blocks: Bytes) -> Floats:
    """The float16 number of blocks of IQ1_M as [n, 1] float32: four bits of each of four words."""
    words = _words(blocks, 48, 56, "<u2") >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)
    halves = np.bitwise_or.reduce(words, axis=1, keepdims=True).astype("<u2")
    return halves.view("<f2").astype(np.float32)


def write_scattered_half(blocks: Bytes, halves: Any) -> None:
    """Gives blocks of IQ1_M their float16 numbers [n]."""
    bits = np.asarray(halves, "<f2").view("<u2").reshape(-1, 1) >> np.arange(0, 16, 4, dtype=np.uint16)
    uppers = blocks[:, 49:56:2]
    uppers[:] = uppers & np.uint8(15) | (bits & 15).astype(np.uint8) << np.uint8(4)


def _iq1_m(blocks: Bytes) -> Parts:
    """Eight numbers have four bits: three upper bits of an index, and the sign of an eighth."""
    fields = _half_bytes(blocks[:, 32:48])
    codes = _add_eighths(blocks[:, :32] | (fields & 7).astype(np.int64) << 8, fields & 8)
    words = _words(blocks, 48, 56, "<u2")[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    scale = read_scattered_half(blocks) * np.float32(0.125)
    return codes, _odd_factors(scale, words.reshape(len(blocks), -1)), None


def _digits(row_bytes: Bytes, count: int) -> Bytes:
    """The first digits of bytes [n, m] in base three, less one: first that of all bytes, then the next."""
    powers = 3 ** np.arange(count, dtype=np.uint8)
    fractions = (row_bytes[:, None, :] * powers[:, None].astype(np.uint8)).reshape(len(row_bytes), -1)
    return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8) - np.uint8(1)


def _tq1_0(blocks: Bytes) -> Parts:
    """Five numbers share a byte. The last 16 numbers have four bytes."""
    parts = [_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)]
    return np.concatenate(parts, axis=1), read_half(blocks, 52).repeat(8, axis=1), None


def _tq2_0(blocks: Bytes) -> Parts:
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)) - np.uint8(1)
    return codes.reshape(len(blocks), -1), read_half(blocks, 64).repeat(8, axis=1), None


READERS: dict[str, Callable[[Bytes], Parts]] = {
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "tq1_0": _tq1_0, "tq2_0": _tq2_0,
}  # fmt: skip
"""Type -> what reads its blocks, as in `blocks.READERS`."""
SCALES = {
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
    "iq1_m": (48,), "tq1_0": (52,), "tq2_0": (64,),
}  # fmt: skip
"""Type -> where a block has its scale, as in `blocks.SCALES`."""
