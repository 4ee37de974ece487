"""Quantised rows are read as their layout says. test_quantized_native.py has the native kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moesaic.core.weight_types import QUANTIZATIONS, Quantization, row_bytes
from moesaic.kernels.quantized_layout import TABLES, dequantize, pack

COLUMNS = [1, 15, 16, 31, 32, 33, 127, 128, 129, 1000, 1023, 1024, 1025, 1152, 2100]


def codes_of(
    rng: np.random.Generator, kind: Quantization, rows: int, columns: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Random codes that stand for numbers, scales and offsets. Every code is among the first rows' codes."""
    codes = rng.integers(0, 1 << kind.bits, (rows, columns)).astype(np.uint8)
    if kind.values == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x7E
    groups = -(-columns // kind.group)
    scales = rng.standard_normal((rows, groups)).astype(np.float32)
    return codes, scales, rng.standard_normal((rows, groups)).astype(np.float32) if kind.offset else None


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", QUANTIZATIONS)
def test_numbers_come_back(dtype: str, columns: int) -> None:
    kind, rng = QUANTIZATIONS[dtype], np.random.default_rng(columns)
    codes, scales, offsets = codes_of(rng, kind, 3, columns)
    stored = pack(dtype, codes, scales, offsets)
    assert stored.shape == (3, row_bytes(dtype, columns)) and stored.dtype == np.uint8
    group = np.arange(columns) // kind.group
    wanted = TABLES[kind.values][codes] * scales[:, group]
    if offsets is not None:
        wanted = wanted + offsets[:, group]
    assert np.array_equal(dequantize(dtype, stored, columns), wanted)


def test_e4m3_has_torchs_values() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(TABLES["e4m3"], every, equal_nan=True)


@pytest.mark.parametrize("dtype", ["int4", "fp8"])
def test_a_row_by_hand(dtype: str) -> None:
    """Two groups: scales, then codes."""
    kind = QUANTIZATIONS[dtype]
    codes = np.zeros((1, kind.group + 1), dtype=np.uint8)
    codes[0, 0], codes[0, 16], codes[0, -1] = 9, 11, 12
    stored = pack(dtype, codes, np.array([[1.0, 2.0]], dtype=np.float32))[0]
    assert stored[:8].view(np.float32).tolist() == [1.0, 2.0]
    if dtype == "int4":
        assert (stored[8], stored[8 + 16]) == (9 | 11 << 4, 12)
    else:
        assert (stored[8], stored[8 + 16], stored[8 + 128]) == (9, 11, 12)
