"""Products of weights in blocks have the bits of the same numbers. ggml's have those of its library."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from tests.kernels.test_compressed_native import NONE, Mlp, Size, reading, uneven
from tests.support import integer_products, k_quants
from tests.support.guarded import Guarded
from tests.support.native_kernels import same_bits

from moesaic.core.weight_types import (
    BLOCK_TYPES,
    GROUP_TYPES,
    INTEGER_GROUP_TYPES,
    NATIVE_DTYPES,
    NVFP4_TYPES,
    expert_code,
    is_integer,
    join_dtypes,
    row_bytes,
)
from moesaic.kernels import blocks, table
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.quantized_layout import Bytes
from moesaic.kernels.table import Kernels

__all__ = ["reading"]
FLOAT32 = NATIVE_DTYPES.index("float32")
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2)}
HALVES |= {"q6_k": (208,), "mxfp4_e8m0": (), "iq1_m": (48,), "tq1_0": (52,), "tq2_0": (64,)}
"""Where a block has numbers in float16, where that is not at its beginning only."""
INTEGER = [name for name in table.instruction_sets() if name in table.INTEGER]
each_integer_set = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == INTEGER[0] else pytest.mark.slow) for name in INTEGER]
    or [pytest.param("", marks=pytest.mark.skip("no integer kernels"))],
)
"""Tiles of amx_int8 are emulated where the CPU has none."""


def draw_blocks(rng: np.random.Generator, dtype: str, rows: int, columns: int) -> Bytes:
    """Random rows. Each code and factor is likely; scales are small numbers of both signs, some subnormal."""
    kind = BLOCK_TYPES[dtype]
    stored = rng.integers(0, 256, (rows * columns // kind.numbers, kind.size)).astype(np.uint8)
    if dtype == blocks.OFFSET_GROUP:
        scales = rng.standard_normal((len(stored), 1)) * rng.choice([1e-6, 1e-3, 0.05], (len(stored), 1))
        stored[:, 1:5] = scales.astype("<f4").view(np.uint8)
        return stored.reshape(rows, row_bytes(dtype, columns))
    if dtype in NVFP4_TYPES:
        factors = rng.standard_normal((len(stored), 1)) * rng.choice([1e-6, 1e-3, 0.05], (len(stored), 1))
        # Those that divide are negative.
        stored[:, :4] = np.where(factors < 0, 1 / factors, factors).astype("<f4").view(np.uint8)
        stored[:, 4 : 4 + BLOCK_TYPES[dtype].numbers // 16] &= 0x37
        return stored.reshape(rows, row_bytes(dtype, columns))
    if dtype in INTEGER_GROUP_TYPES:
        scales = rng.standard_normal(len(stored)) * rng.choice([1e-6, 1e-3, 0.05], len(stored))
        bf16 = (scales.astype("<f4").view("<u4") >> 16).astype("<u2")
        bits = np.where(stored[:, 0] & blocks.BF16_SCALE, bf16, scales.astype("<f2").view("<u2"))
        stored[:, 1:3] = bits.astype("<u2").reshape(-1, 1).view(np.uint8)
        return stored.reshape(rows, row_bytes(dtype, columns))
    for place in HALVES.get(dtype, (0,)):
        scales = rng.standard_normal(len(stored)) * rng.choice([1e-6, 1e-3, 0.05], len(stored))
        k_quants.put_scales(dtype.upper(), stored, place, scales)
    if dtype == "mxfp4_e8m0":
        stored[:, 0] = rng.choice([0, 1, 2, 110, 122, 127], len(stored))
    return stored.reshape(rows, row_bytes(dtype, columns))


def sizes(*types: str) -> list[Size]:
    """Sizes of experts whose rows are whole blocks of all these types: shorter and longer than a stretch."""
    if all(BLOCK_TYPES[dtype].numbers == 32 for dtype in types):
        return [Size(32, 96), Size(1056, 64), Size(2080, 32)]
    return [Size(256, 256), Size(1280, 512), Size(2304, 256)]


def draw_mlp(rng: np.random.Generator, inner: str, down: str, size: Size) -> list[Bytes]:
    types = inner, inner, down
    return [draw_blocks(rng, dtype, *shape) for dtype, shape in zip(types, size.shapes, strict=True)]


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    yield
    table.pick("cpu").set_threads(1, False)


@pytest.mark.parametrize("dtype", [name for name in BLOCK_TYPES if name not in GROUP_TYPES])
def test_numbers_are_those_of_the_library(dtype: str) -> None:
    name = "MXFP4" if dtype == "mxfp4_e8m0" else dtype.upper()
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (BLOCK_TYPES[dtype].numbers, BLOCK_TYPES[dtype].size)
    stored = draw_blocks(np.random.default_rng(1), dtype, 40, 512)
    assert np.array_equal(blocks.dequantize(dtype, stored), gguf.quants.dequantize(stored, kind))


PAIRS = [
    *((dtype, dtype) for dtype in BLOCK_TYPES),
    ("q4_k", "q6_k"),
    ("mxfp4_e8m0", "q8_0"),
    ("q2_k", "q3_k"),
    ("iq2_xxs", "iq3_s"),
]


@pytest.mark.parametrize(("inner", "down"), PAIRS)
def test_experts_have_the_bits_of_float32(reading: Kernels, inner: str, down: str) -> None:
    for size in sizes(inner, down):
        rng, code = np.random.default_rng(size.h), expert_code(join_dtypes(inner, down))
        stored = [draw_mlp(rng, inner, down, size) for _ in range(4)]
        types = inner, inner, down
        floats = [
            Mlp([blocks.dequantize(dtype, rows) for dtype, rows in zip(types, mlp, strict=True)])
            for mlp in stored
        ]
        for n in (1, 3, 9, 25, 200):
            rows, ids = 0.1 * rng.standard_normal((n, size.h), dtype=np.float32), uneven(rng, n)
            wanted = size.run([*floats, NONE], FLOAT32, rows, ids)
            assert wanted.any()
            for threads in (1, 2):
                reading.set_threads(threads, False)
                assert np.array_equal(size.run([*map(Mlp, stored), NONE], code, rows, ids), wanted)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_dense_matrices_have_the_bits_of_float32(reading: Kernels, dtype: str) -> None:
    for rows, columns in ((9, 256), (65, 1280), (3, 2304)):
        stored = draw_blocks(np.random.default_rng(columns), dtype, rows, columns)
        weight = QuantizedMatrix(Guarded()(torch.from_numpy(stored)), columns, dtype)
        floats, ids = torch.from_numpy(blocks.dequantize(dtype, stored)), torch.tensor([rows - 1, 0, 1])
        assert same_bits(reading.embed(weight, ids), floats[ids])
        for count in (1, 2, 3, 4, 5, 8, 9, 30, 300):
            hidden = torch.randn(count, columns)
            assert same_bits(reading.linear(hidden, weight, None), reading.linear(hidden, floats, None))


@each_integer_set
@pytest.mark.parametrize(("inner", "down"), PAIRS)
def test_integer_products_have_the_bits_of_the_slow_ones(name: str, inner: str, down: str) -> None:
    dtype = join_dtypes(inner, down)
    assert is_integer(dtype)
    for size in sizes(inner, down)[:2]:
        rng = np.random.default_rng(size.h)
        mlp = draw_mlp(rng, inner, down, size)
        rows = torch.from_numpy(0.1 * rng.standard_normal((19, size.h), dtype=np.float32))
        wanted = integer_products.expert(table.INTEGER[name], dtype, mlp, rows)
        kernels = table.pick("cpu", name)
        for count, threads in ((1, 1), (2, 2), (3, 1), (19, 2)):
            kernels.set_threads(threads, False)
            stored = size.run([Mlp(mlp)], expert_code(dtype), rows[:count].numpy(), [0] * count)
            assert same_bits(torch.from_numpy(stored.view(np.float32)), wanted[:count])


@each_integer_set
@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_integer_linears_have_the_bits_of_the_slow_ones(name: str, dtype: str) -> None:
    """For few rows, whole tiles of 16 rows, and the last 8 and 9 rows beside such tiles."""
    kernels = table.pick("cpu", name)
    shapes = [(33, 256), (17, 1280)]
    if BLOCK_TYPES[dtype].numbers == 32:
        shapes += [(5, 96), (33, 1184)]  # rows that end in a part of 128 numbers
    for columns, numbers in shapes:
        stored = draw_blocks(np.random.default_rng(numbers), dtype, columns, numbers)
        weight = QuantizedMatrix(Guarded()(torch.from_numpy(stored)), numbers, dtype)
        rows, bias = torch.randn(100, numbers), torch.randn(columns)
        wanted = integer_products.linear(rows, weight, bias)
        for count, threads in ((1, 1), (2, 2), (8, 1), (9, 2), (16, 1), (24, 2), (25, 1), (100, 2)):
            kernels.set_threads(threads, False)
            assert same_bits(kernels.linear(rows[:count], weight, bias), wanted[:count]), count


@each_integer_set
@pytest.mark.parametrize("dtype", [name for name in BLOCK_TYPES if name not in GROUP_TYPES])
def test_the_largest_codes_of_blocks_do_not_overflow(name: str, dtype: str) -> None:
    """Sums have 16 bits for a while, so all numbers of a row and of a block are the largest here."""
    kernels, kind = table.pick("cpu", name), BLOCK_TYPES[dtype]
    columns, numbers = 16, 256
    for byte in (0x00, 0x80, 0xFF):
        stored = np.full((columns * numbers // kind.numbers, kind.size), byte, np.uint8)
        for place in HALVES.get(dtype, (0,)):
            k_quants.put_scales(dtype.upper(), stored, place, np.full(len(stored), 0.01))
        if dtype == "mxfp4_e8m0":
            stored[:, 0] = 120
        weight = QuantizedMatrix(torch.from_numpy(stored.reshape(columns, -1)), numbers, dtype)
        rows = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).repeat(1, numbers)
        wanted = integer_products.linear(rows, weight, None)
        for count in (1, 2, 4):
            assert same_bits(kernels.linear(rows[:count], weight, None), wanted[:count]), (byte, count)
