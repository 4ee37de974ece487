"""Experts with quantised weights have the same bits as experts with the dequantised weights in float32."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kernels.test_compressed_native import NONE, SIZES, Mlp, Size, reading, uneven
from tests.kernels.test_quantized_layout import codes_of

from moesaic.core.weight_types import (
    NATIVE_DTYPES,
    QUANTIZATIONS,
    expert_code,
    join_dtypes,
)
from moesaic.kernels.quantized_layout import Bytes, dequantize, pack
from moesaic.kernels.table import Kernels

__all__ = ["reading"]
FLOAT32 = NATIVE_DTYPES.index("float32")


def packed(rng: np.random.Generator, dtype: str, size: Size) -> list[Bytes]:
    return [pack(dtype, *codes_of(rng, QUANTIZATIONS[dtype], *shape)) for shape in size.shapes]


def plain(dtype: str, size: Size, stored: list[Bytes]) -> Mlp:
    return Mlp([dequantize(dtype, one, shape[1]) for one, shape in zip(stored, size.shapes, strict=True)])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", QUANTIZATIONS)
def test_experts_have_the_bits_of_float32(reading: Kernels, dtype: str, size: Size) -> None:
    rng, kind = np.random.default_rng(size.h), NATIVE_DTYPES.index(dtype)
    stored = [packed(rng, dtype, size) for _ in range(4)]
    wide, small = [*(plain(dtype, size, one) for one in stored), NONE], [*map(Mlp, stored), NONE]
    for n in (1, 3, 25, 200):
        rows, ids = 0.1 * rng.standard_normal((n, size.h), dtype=np.float32), uneven(rng, n)
        wanted = size.run(wide, FLOAT32, rows, ids)
        assert wanted.any() or size.h == 1
        for threads in (1, 2):
            reading.set_threads(threads, False)
            assert np.array_equal(size.run(small, kind, rows, ids), wanted)
        alone = size.run(small, kind, rows[n // 2 : n // 2 + 1], [ids[n // 2]])
        assert np.array_equal(alone[0], wanted[n // 2])


MIXED = [("int4_offset", "int8_16"), ("mxfp4", "int8"), ("int8_16", "fp8"), ("int8_offset", "int4")]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("inner", "down"), MIXED)
def test_down_may_have_another_type(reading: Kernels, inner: str, down: str, size: Size) -> None:
    rng, kind = np.random.default_rng(size.w), expert_code(join_dtypes(inner, down))
    types, shapes = (inner, inner, down), size.shapes
    stored = [
        [pack(of, *codes_of(rng, QUANTIZATIONS[of], *shape)) for of, shape in zip(types, shapes, strict=True)]
        for _ in range(3)
    ]
    wide = [
        Mlp([dequantize(of, one, shape[1]) for of, one, shape in zip(types, each, shapes, strict=True)])
        for each in stored
    ]
    for n in (1, 4, 40):
        rows = 0.1 * rng.standard_normal((n, size.h), dtype=np.float32)
        ids = rng.integers(0, 3, n).tolist()
        wanted = size.run(wide, FLOAT32, rows, ids)
        for threads in (1, 2):
            reading.set_threads(threads, False)
            assert np.array_equal(size.run(list(map(Mlp, stored)), kind, rows, ids), wanted)


def test_types_that_do_not_go_together(reading: Kernels) -> None:
    rows = np.ones((1, 3), dtype=np.float32)
    kind = NATIVE_DTYPES.index("int8") + 256 * (1 + FLOAT32)
    with pytest.raises(ValueError, match="stored: two types; allowed: only quantised ones"):
        Size(3, 65).run([NONE], kind, rows, [0])


def test_types_that_kernels_do_not_read(native: Kernels) -> None:
    size = Size(3, 65)
    rows = np.ones((1, 3), dtype=np.float32)
    wrong = len(NATIVE_DTYPES) if native.can_use_quantized else NATIVE_DTYPES.index("fp8")
    with pytest.raises(ValueError, match=f"stored: got {wrong}; allowed: 0 to"):
        size.run([NONE], wrong, rows, [0])
