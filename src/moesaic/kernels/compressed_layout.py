"""bf16 matrices in 12 bits a number, without loss. `csrc/compressed.h` describes the layout and reads it.

Exponents of neighbouring weights are close together. Four bits give one of fourteen exponents, counted down
from one that a block of 1024 numbers shares, or say that the exponent is 0. Numbers with another exponent,
at most 15 in a block, are stored completely in the block's head. DFloat11 (Zhang et al. 2025) observed that
exponents of trained weights carry few bits. Its codes have lengths by frequency; codes of equal length need
no table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.weight_types import BLOCK, COMPRESSED_DTYPE, GROUP, GROUP_BYTES, HEAD, row_bytes

WINDOW = 14
"""Codes below this are the difference from the head's exponent."""
ZERO, STRANGE = 14, 15
"""Codes of exponent 0, and of a number that is stored completely in the head."""
MOST_STRANGE = 15
"""Maximum number of such numbers in a block."""

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

_byte = np.arange(GROUP)
ORDER = _byte // 16 * 8 + _byte % 8 + _byte % 16 // 8 * 32
"""Index within a group of the number that each of its bytes belongs to."""


class Incompressible(ValueError):
    """A block has more than MOST_STRANGE numbers whose exponents have no code."""


def compress(matrix: Bits) -> Bytes:
    """The bits of bf16 [rows, columns] -> [rows, row_bytes]. Raises Incompressible."""
    rows, columns = matrix.shape
    stored_rows = np.zeros((rows, row_bytes(COMPRESSED_DTYPE, columns)), dtype=np.uint8)
    offset = 0
    for begin in range(0, columns, BLOCK):
        block = matrix[:, begin : begin + BLOCK]
        size = row_bytes(COMPRESSED_DTYPE, block.shape[1])
        _compress_blocks(block, stored_rows[:, offset : offset + size])
        offset += size
    return stored_rows


def decompress(stored_rows: Bytes, columns: int) -> Bits:
    """The input of `compress`. The numbers of a damaged block are undefined."""
    bits = np.empty((len(stored_rows), columns), dtype=np.uint16)
    offset = 0
    for begin in range(0, columns, BLOCK):
        count = min(BLOCK, columns - begin)
        size = row_bytes(COMPRESSED_DTYPE, count)
        bits[:, begin : begin + count] = _decompress_blocks(stored_rows[:, offset : offset + size])[:, :count]
        offset += size
    return bits


def _compress_blocks(block: Bits, stored_rows: Bytes) -> None:
    """Compresses one block of every row into `stored_rows`."""
    rows, count = block.shape
    exponents = (block >> 7).astype(np.uint8)
    largest = _most_common(exponents)
    codes_below = largest[:, None].astype(np.int16) - exponents
    codes = np.where((codes_below >= 0) & (codes_below < WINDOW), codes_below, STRANGE).astype(np.uint8)
    codes[exponents == 0] = ZERO
    stored_rows[:, 0] = largest
    _put_strange(block, codes == STRANGE, stored_rows)
    # The reader decodes whole groups, so the last one is filled up with codes of zero.
    padded_count = -(-count // GROUP) * GROUP
    padded_codes = np.full((rows, padded_count), ZERO, dtype=np.uint8)
    padded_codes[:, :count] = codes
    ordered_codes = padded_codes.reshape(rows, padded_count // GROUP, GROUP)[:, :, ORDER]
    numbers = np.zeros((rows, padded_count), dtype=np.uint8)
    numbers[:, :count] = (block >> 8 & 0x80) | (block & 0x7F)
    groups = stored_rows[:, HEAD:].reshape(rows, padded_count // GROUP, GROUP_BYTES)
    groups[:, :, :GROUP] = numbers.reshape(rows, padded_count // GROUP, GROUP)[:, :, ORDER]
    half = GROUP // 2
    groups[:, :, GROUP:] = ordered_codes[:, :, :half] | ordered_codes[:, :, half:] << 4


def _most_common(exponents: Bytes) -> Bytes:
    """Returns the exponent of each row which, with the thirteen below it, covers most of its numbers."""
    rows = len(exponents)
    places = exponents.astype(np.intp) + 256 * np.arange(rows)[:, None]
    # One histogram for all rows: row r counts in bins 256 r to 256 r + 255.
    counts = np.bincount(places.ravel(), minlength=256 * rows).reshape(rows, 256)
    counts[:, 0] = 0  # exponent 0 has a code of its own
    sums = np.cumsum(counts, axis=1)
    windows = sums[:, WINDOW:] - sums[:, :-WINDOW]
    largest: Bytes = (np.argmax(windows, axis=1) + WINDOW).astype(np.uint8)
    return largest


def _put_strange(block: Bits, strange: npt.NDArray[np.bool_], stored_rows: Bytes) -> None:
    counts = np.count_nonzero(strange, axis=1)
    worst = int(counts.max(initial=0))
    if worst > MOST_STRANGE:
        raise Incompressible(
            f"{worst} of {block.shape[1]} numbers in a row have exponents far from the others'; "
            f"allowed: at most {MOST_STRANGE}"
        )
    stored_rows[:, 1] = counts
    rows, places = np.nonzero(strange)
    turn = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    for byte, part in enumerate((places, places >> 8, block[rows, places], block[rows, places] >> 8)):
        stored_rows[rows, 4 + 4 * turn + byte] = (part & 0xFF).astype(np.uint8)


def _decompress_blocks(stored_rows: Bytes) -> Bits:
    """Decompress one block of every row, filled up to whole groups."""
    rows = len(stored_rows)
    groups = stored_rows[:, HEAD:].reshape(rows, -1, GROUP_BYTES)
    pairs = groups[:, :, GROUP:]
    numbers = np.empty((rows, groups.shape[1], GROUP), dtype=np.uint8)
    codes = np.empty_like(numbers)
    numbers[:, :, ORDER] = groups[:, :, :GROUP]
    codes[:, :, ORDER] = np.concatenate((pairs & 0x0F, pairs >> 4), axis=2)
    largest = stored_rows[:, :1, None]
    exponents = np.where(codes < WINDOW, largest - codes, np.uint8(0)).astype(np.uint16)
    signs = (numbers & np.uint8(0x80)).astype(np.uint16)
    bits: Bits = (signs << np.uint16(8) | exponents << np.uint16(7) | (numbers & np.uint8(0x7F))).reshape(
        rows, -1
    )
    for row in np.flatnonzero(stored_rows[:, 1]):
        # A damaged block may claim more numbers than fit, or places outside of it. Neither may be followed.
        count = min(int(stored_rows[row, 1]), MOST_STRANGE)
        places, full_numbers = stored_rows[row, 4 : 4 + 4 * count].view("<u2").reshape(count, 2).T
        bits[row, places % BLOCK % bits.shape[1]] = full_numbers
    return bits
