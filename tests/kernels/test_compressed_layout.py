"""bf16 numbers in 12 bits come back bit by bit. test_compressed_native.py has the native kernels."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.weight_types import BLOCK, COMPRESSED_DTYPE, GROUP, GROUP_BYTES, HEAD, row_bytes
from moesaic.kernels.compressed_layout import (
    MOST_STRANGE,
    STRANGE,
    WINDOW,
    ZERO,
    Bits,
    Bytes,
    Incompressible,
    compress,
    decompress,
)

ENDS = (0, 1, 31, 32, 63, 64, 1022, 1023)
"""Places of a block where a group, a vector or the block begins or ends. The last number of the
block is one.
"""
SPECIAL = (0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7FA5)
"""Both zeros, denormals, infinities, and quiet and signalling NaNs."""
EXPONENTS = st.integers(0, 255)
SEEDS = st.integers(0, 2**32 - 1)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], top: int, width: int) -> Bits:
    """Numbers with random signs and mantissas. Exponents are the `width` ones from `top` down. Every eighth
    is 0."""
    exponents = np.where(rng.random(shape) < 1 / 8, 0, top - rng.integers(0, width, shape))
    return (exponents << 7 | rng.integers(0, 2, shape) << 15 | rng.integers(0, 128, shape)).astype(np.uint16)


def put_strange(rng: np.random.Generator, block: Bits, count: int, values: Bits) -> None:
    """Puts `count` of the values into places of one block [c], first at its ends."""
    ends = [place for place in (*ENDS, len(block) - 1) if place < len(block)]
    places = np.array(list(dict.fromkeys((*rng.permutation(ends), *rng.permutation(len(block))))), dtype=int)
    block[places[:count]] = rng.choice(values, min(count, len(block)))


def matrix(rng: np.random.Generator, rows: int, columns: int, strange: bool = True) -> Bits:
    """A matrix whose every block has a scale of its own and up to MOST_STRANGE numbers with any bits."""
    out = np.empty((rows, columns), dtype=np.uint16)
    for row, begin in itertools.product(out, range(0, columns, BLOCK)):
        block = row[begin : begin + BLOCK]
        block[:] = numbers(rng, block.shape, int(rng.integers(WINDOW, 256)), WINDOW)
        if strange:
            values = np.concatenate((rng.integers(0, 2**16, 20), SPECIAL)).astype(np.uint16)
            put_strange(rng, block, int(rng.integers(0, MOST_STRANGE + 1)), values)
    return out


def read(row: Bytes, columns: int) -> tuple[list[int], set[int]]:
    """The bits of a row, read number by number as `csrc/compressed.h` describes them, and the codes of the
    row."""
    bits, codes = [], set()
    for number in range(columns):
        head = row[number // BLOCK * row_bytes(COMPRESSED_DTYPE, BLOCK) :]
        place = number % BLOCK
        group = head[HEAD + place // GROUP * GROUP_BYTES :]
        half, other = divmod(place % GROUP, GROUP // 2)
        byte = other // 8 * 16 + half * 8 + other % 8
        code = int(group[GROUP + byte % 32]) >> byte // 32 * 4 & 15
        codes.add(code)
        whole = {head[4 + 4 * i] | head[5 + 4 * i] << 8: 4 + 4 * i for i in range(head[1])}
        if code == STRANGE:
            bits.append(int(head[whole[place] + 2]) | int(head[whole[place] + 3]) << 8)
        else:
            exponent = 0 if code == ZERO else int(head[0]) - code
            bits.append((int(group[byte]) & 0x80) << 8 | exponent << 7 | int(group[byte]) & 0x7F)
    return bits, codes


@given(SEEDS, st.integers(1, 4), st.integers(1, 3000))
def test_every_bit_comes_back(seed: int, rows: int, columns: int) -> None:
    bits = matrix(np.random.default_rng(seed), rows, columns)
    stored = compress(bits)
    assert stored.shape == (rows, row_bytes(COMPRESSED_DTYPE, columns)) and stored.dtype == np.uint8
    found = decompress(stored, columns)
    assert found.dtype == np.uint16 and np.array_equal(found, bits)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1023, 1024, 1025, 2111])
def test_the_bytes_lie_as_described(columns: int) -> None:
    bits = matrix(np.random.default_rng(columns), 3, columns)
    rows = [row.astype(int) for row in compress(bits)]
    assert [read(row, columns)[0] for row in rows] == bits.tolist()
    assert not any(row[at : at + 2].any() for row in rows for at in range(2, len(row), 1600))
    if columns >= 1023:
        assert set.union(*(read(row, columns)[1] for row in rows)) == set(range(16))


def test_every_field_of_a_head_occurs() -> None:
    bits = np.full((MOST_STRANGE + 1, BLOCK), 0x3F80, dtype=np.uint16)
    for count, row in enumerate(bits):
        row[np.linspace(0, BLOCK - 1, count).astype(int)] = 0xA5A5 + np.arange(count)
    stored = compress(bits)
    assert stored[:, 1].tolist() == list(range(MOST_STRANGE + 1))
    last = stored[-1, 4:HEAD].view("<u2").reshape(MOST_STRANGE, 2)
    assert last.T.tolist() == [
        np.linspace(0, BLOCK - 1, MOST_STRANGE).astype(int).tolist(),
        (0xA5A5 + np.arange(MOST_STRANGE)).tolist(),
    ]
    assert np.array_equal(decompress(stored, BLOCK), bits)


def test_all_bits_there_are() -> None:
    """Tries one exponent at a time, with every sign and mantissa."""
    every = np.arange(2**16, dtype=np.uint16)
    for exponent in range(256):
        own = every[every >> 7 & 0xFF == exponent]
        assert np.array_equal(decompress(compress(own[None]), 256), own[None])


@given(
    SEEDS,
    st.integers(1, 2500),
    st.lists(st.tuples(EXPONENTS, st.integers(0, 17)), max_size=5),
    st.tuples(EXPONENTS, st.integers(1, 40)),
)
def test_refused_is_what_no_window_covers(
    seed: int, columns: int, others: list[tuple[int, int]], most: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    exponents = (most[0] - rng.integers(0, most[1], columns)).clip(0, 255)
    for exponent, count in others:
        exponents[rng.integers(0, columns, count)] = exponent
    bits = (exponents << 7 | rng.integers(0, 128, columns)).astype(np.uint16)[None]
    blocks = [exponents[begin : begin + BLOCK] for begin in range(0, columns, BLOCK)]
    if max(map(fewest_strange, blocks)) > MOST_STRANGE:
        with pytest.raises(Incompressible, match="allowed: at most 15"):
            compress(bits)
    else:
        assert np.array_equal(decompress(compress(bits), columns), bits)


def fewest_strange(exponents: npt.NDArray[np.int64]) -> int:
    """The numbers that have neither exponent 0 nor one of the best window's exponents."""
    own = exponents[exponents > 0]
    return min(int(np.count_nonzero((own > top) | (own <= top - WINDOW))) for top in range(WINDOW, 256))


@pytest.mark.parametrize("columns", [40, 1024, 1124])
def test_one_too_many_is_refused_wherever_it_is(columns: int) -> None:
    bits = np.full((3, columns), 0x3F80, dtype=np.uint16)
    begin = (columns - 1) // BLOCK * BLOCK
    places = np.linspace(begin, columns - 1, MOST_STRANGE + 1).astype(int)
    bits[1, places[1:]] = 0x0080
    assert np.array_equal(decompress(compress(bits), columns), bits)
    bits[1, places[0]] = 0x0080
    with pytest.raises(Incompressible, match=f"16 of {columns - begin} numbers"):
        compress(bits)


def test_rows_of_nothing_take_no_bytes() -> None:
    stored = compress(np.empty((3, 0), dtype=np.uint16))
    assert stored.shape == (3, 0)
    assert decompress(stored, 0).shape == (3, 0)


@given(SEEDS, st.integers(1, 3), st.integers(1, 3000), st.sampled_from([0, 0x7F, 0xFF, None]))
def test_damaged_bytes_are_some_numbers(seed: int, rows: int, columns: int, fill: int | None) -> None:
    shape = (rows, row_bytes(COMPRESSED_DTYPE, columns))
    stored = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    if fill is not None:
        stored[:] = fill
    found = decompress(stored, columns)
    assert found.shape == (rows, columns) and found.dtype == np.uint16
