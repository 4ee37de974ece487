"""The blocks of GGUF files have the numbers of the library `gguf`, and groups those of their definition."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from scripts import write_grids
from tests.support import k_quants

from moesaic.core.weight_types import (
    BLOCK_TYPES,
    GROUP_TYPES,
    INTEGER_GROUP_TYPES,
    NVFP4_TYPES,
    QUANTIZATIONS,
    choose_common_type,
    row_bytes,
)
from moesaic.kernels import blocks, quantized_layout
from moesaic.kernels.matrix import QuantizedMatrix

Bytes = npt.NDArray[np.uint8]
GGML_TYPES = [dtype for dtype in BLOCK_TYPES if dtype not in GROUP_TYPES]
EXTREMES = {
    "ordinary": [1.0, -0.37, 0.01], "tiny": [6e-8, -6e-8, 0.0], "huge": [65504.0, -65504.0, 3e4],
}  # fmt: skip
"""Scales in float16: of ordinary size, the smallest that are no zero, and the largest."""
EXPONENTS = {"ordinary": [120, 127, 130], "tiny": [0, 1, 2], "huge": [250, 251, 252]}


def ggml_type(dtype: str) -> GGMLQuantizationType:
    return GGMLQuantizationType["MXFP4" if dtype == "mxfp4_e8m0" else dtype.upper()]


def random_rows(dtype: str, scales: str, rows: int = 12, count: int = 5) -> Bytes:
    """Rows of `count` blocks with random codes, and scales of EXTREMES in every place of a block."""
    rng, block = np.random.default_rng(3), BLOCK_TYPES[dtype]
    stored_rows = rng.integers(0, 256, (rows, count * block.size), dtype=np.uint8)
    each = stored_rows.reshape(-1, block.size)
    if dtype == blocks.OFFSET_GROUP:
        numbers = rng.choice(EXTREMES[scales], (len(each), 1)).astype("<f4") / np.float32(3)
        each[:, 1:5] = numbers.view(np.uint8)
        return stored_rows
    if dtype in NVFP4_TYPES:
        factors = rng.choice(EXTREMES[scales], (len(each), 1)).astype("<f4") / np.float32(3)
        each[:, :4] = factors.view(np.uint8)
        each[:, 4:] &= 0x77
        return stored_rows
    if dtype in INTEGER_GROUP_TYPES:
        each[:, 0] &= 15
    for offset in blocks.SCALES.get(dtype, ()):
        k_quants.put_scales(dtype.upper(), each, offset, rng.choice(EXTREMES[scales], len(each)))
    if dtype not in blocks.SCALES:
        each[:, 0] = rng.choice(EXPONENTS[scales], len(each))
    return stored_rows


@pytest.mark.parametrize("scales", EXTREMES)
@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_every_type_has_the_numbers_of_the_library(dtype: str, scales: str) -> None:
    stored_rows = random_rows(dtype, scales)
    wanted = gguf.dequantize(stored_rows, ggml_type(dtype))
    assert wanted.any() and np.isfinite(wanted).all()
    assert blocks.find_not_finite(dtype, stored_rows) is None
    assert blocks.dequantize(dtype, stored_rows).tobytes() == wanted.tobytes()
    matrix = QuantizedMatrix(torch.from_numpy(stored_rows), wanted.shape[1], dtype)
    assert torch.equal(matrix.floats(), torch.from_numpy(wanted))
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(matrix.select_rows(chosen).floats(), torch.from_numpy(wanted)[chosen])


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_a_conversion_keeps_the_numbers(dtype: str) -> None:
    stored_rows, kind = random_rows(dtype, "ordinary"), BLOCK_TYPES[dtype].conversion
    codes, scales, offsets = blocks.decode_conversion(dtype, stored_rows)
    repeat = BLOCK_TYPES[dtype].group // QUANTIZATIONS[kind].group
    parts = [part if part is None else part.repeat(repeat, axis=1) for part in (scales, offsets)]
    assert parts[0] is not None
    packed = quantized_layout.pack(kind, codes, parts[0], parts[1])
    numbers = quantized_layout.dequantize(kind, packed, codes.shape[1])
    assert np.array_equal(numbers, blocks.dequantize(dtype, stored_rows))


@pytest.mark.parametrize("scales", EXTREMES)
@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_a_type_for_two_keeps_the_numbers(dtype: str, scales: str) -> None:
    stored_rows = random_rows(dtype, scales)
    wanted = blocks.dequantize(dtype, stored_rows)
    for other in GGML_TYPES:
        kind = choose_common_type([dtype, other])
        if (dtype, scales) == ("mxfp4_e8m0", "huge") and QUANTIZATIONS[kind].offset:
            continue  # codes without a sign would be twice as large, which is infinite here
        if other == dtype:
            assert kind == BLOCK_TYPES[dtype].conversion
        codes, group_scales, offsets = blocks.decode_as(kind, dtype, stored_rows)
        assert (offsets is None) == (not QUANTIZATIONS[kind].offset)
        packed = quantized_layout.pack(kind, codes, group_scales, offsets)
        assert np.array_equal(quantized_layout.dequantize(kind, packed, codes.shape[1]), wanted), other


@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_numbers_that_are_not_finite_are_found_in_every_place_of_a_block(dtype: str) -> None:
    sound = random_rows(dtype, "huge")
    if dtype not in blocks.SCALES:
        for exponent, says in ((255, "nan"), (254, "inf"), (253, "inf")):
            stored_rows = sound.copy()
            stored_rows[7, 2 * BLOCK_TYPES[dtype].size] = exponent
            assert str(blocks.find_not_finite(dtype, stored_rows)) == says
        return
    for offset in blocks.SCALES[dtype]:
        for number in (float("nan"), float("inf"), -float("inf")):
            stored_rows = sound.copy()
            begin = 2 * BLOCK_TYPES[dtype].size + offset
            block = stored_rows[7:8, begin - offset : begin - offset + BLOCK_TYPES[dtype].size]
            k_quants.put_scales(dtype.upper(), block, offset, [number])
            assert str(blocks.find_not_finite(dtype, stored_rows)) == str(number)
            assert not np.isfinite(blocks.dequantize(dtype, stored_rows)).all()


@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_bytes_of_rows_are_those_of_the_library(dtype: str) -> None:
    numbers, size = gguf.GGML_QUANT_SIZES[ggml_type(dtype)]
    assert (BLOCK_TYPES[dtype].numbers, BLOCK_TYPES[dtype].size) == (numbers, size)
    assert row_bytes(dtype, 1024) == 1024 // numbers * size
    with pytest.raises(ValueError, match=f"rows of 1040 numbers; allowed: multiples of {numbers}"):
        row_bytes(dtype, 1040)


NARROW_SCALES = {
    "float16": np.array([6e-8, -6e-8, 0.011, -0.37, 65504.0], "<f2").astype(np.float32),
    "bfloat16": np.array([1e-30, -3e-9, 0.0117, -0.371, 1e30], "<f4"),
}
NARROW_SCALES["bfloat16"] = (NARROW_SCALES["bfloat16"].view("<u4") & 0xFFFF0000).view("<f4")
"""Scales as files may have them: of ordinary size, and those that only one type of 16 bits holds."""


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("scale_type", NARROW_SCALES)
@pytest.mark.parametrize("dtype", INTEGER_GROUP_TYPES)
def test_groups_have_the_numbers_of_their_definition(dtype: str, scale_type: str, repeats: int) -> None:
    rng, block = np.random.default_rng(5), BLOCK_TYPES[dtype]
    columns, is_int4 = 8 * block.numbers, dtype.startswith("int4")
    codes = rng.integers(0, 16 if is_int4 else 256, (6, columns)).astype(np.uint8)
    packed_codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4) if is_int4 else codes
    scales = rng.choice(NARROW_SCALES[scale_type], (6, 8 // repeats))
    most_zero = 15 if is_int4 else 255 if dtype == blocks.OFFSET_GROUP else 0
    zeros = rng.integers(0, most_zero + 1, scales.shape).astype(np.uint8)
    rows = blocks.pack_groups(dtype, packed_codes, scales, zeros)
    assert rows.shape == (6, row_bytes(dtype, columns))
    values = (codes.view(np.int8) if dtype == "int8_g128" else codes).astype(np.float64)
    of_group = columns // scales.shape[1]
    wanted = (values - zeros.repeat(of_group, axis=1)) * scales.repeat(of_group, axis=1).astype(np.float64)
    numbers = blocks.dequantize(dtype, rows)
    assert np.array_equal(numbers, wanted) and wanted.any()
    assert torch.equal(
        QuantizedMatrix(torch.from_numpy(rows), columns, dtype).floats(), torch.from_numpy(numbers)
    )
    assert blocks.find_not_finite(dtype, rows) is None
    one_scale = blocks.pack_groups(dtype, packed_codes, scales[:, :1])
    assert (
        blocks.pack_groups(dtype, packed_codes, scales[:, :1].repeat(8, axis=1)).tobytes()
        == one_scale.tobytes()
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("dtype", INTEGER_GROUP_TYPES)
def test_scales_that_make_numbers_infinite_are_found(dtype: str, number: float) -> None:
    scales = np.ones((3, 4), dtype=np.float32)
    size = BLOCK_TYPES[dtype].size - blocks.GROUP_HEADS[dtype]
    scales[2, 1] = number
    scales = (scales.view("<u4") & 0xFFFF0000).view("<f4")
    rows = blocks.pack_groups(dtype, np.full((3, 4 * size), 0x77, np.uint8), scales)
    assert str(blocks.find_not_finite(dtype, rows)) == str(float(scales[2, 1]))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("dtype", NVFP4_TYPES)
def test_nvfp4_has_the_numbers_of_its_definition(dtype: str, divides: bool) -> None:
    """The product or quotient of a scale and the factor is rounded to float32 before it is multiplied."""
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 16, (6, 384)).astype(np.uint8)
    scales = rng.permutation(np.arange(0x7F, dtype=np.uint8).repeat(2))[: 6 * 24].reshape(6, 24)
    factor, wide = np.float32(0.0371), torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy()
    rows = blocks.pack_nvfp4(
        dtype, codes[:, ::2] | codes[:, 1::2] << np.uint8(4), scales, -factor if divides else factor
    )
    assert rows.shape == (6, row_bytes(dtype, 384))
    group_scales = wide / factor if divides else wide * factor
    wanted = E2M1[codes] * group_scales.repeat(16, axis=1)
    assert np.array_equal(blocks.dequantize(dtype, rows), wanted) and wanted.any()
    assert blocks.find_not_finite(dtype, rows) is None
    for damage in (float("nan"), float("inf"), 1e-38 if divides else 1e38):
        damaged = blocks.pack_nvfp4(dtype, codes[:, ::2], scales, -damage if divides else damage)
        assert blocks.find_not_finite(dtype, damaged) is not None or (divides and damage == float("inf"))
    scales[3, 5] = 0x7F
    assert blocks.find_not_finite(dtype, blocks.pack_nvfp4(dtype, codes[:, ::2], scales, 1.0)) is not None


def test_grids_are_those_of_the_library() -> None:
    assert write_grids.write_grids(["--check"]) == 0
