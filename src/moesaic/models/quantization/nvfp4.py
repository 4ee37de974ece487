"""NVFP4: E2M1 numbers with a scale in E4M3 for each 16, and a float32 for the matrix. And MXFP4.

Other programs write them with other names of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import BLOCK_TYPES, NVFP4_TYPES
from moesaic.kernels.blocks import E2M1, pack_nvfp4
from moesaic.kernels.quantized_layout import TABLES
from moesaic.models.quantization import mxfp4
from moesaic.models.quantization.scheme import Bytes, CodedMatrix, Floats, Kinds, Matrix, Part

GROUP = 16
"""Numbers that share a scale."""


@dataclass(frozen=True)
class Nvfp4:
    """Two codes a byte [rows, columns / 2], the first in the low half, and scales [rows, columns / 16]."""

    codes: str
    """The last part of the name of the tensor with codes."""
    factor: str
    """The same of the tensor with one float32, which scales are multiplied or divided by."""
    divides: bool

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        if kinds(f"{name}.{self.codes}") != "U8" or kinds(f"{name}.{self.factor}") is None:
            return None
        _check_columns(name, columns, GROUP, "NVFP4")
        parts = (
            Part(f"{name}.{self.codes}", ("U8",), (rows, columns // 2)),
            Part(f"{name}.weight_scale", ("F8_E4M3",), (rows, columns // GROUP)),
            Part(f"{name}.{self.factor}", ("F32",), (1,), shapes=((),)),
        )
        dtype = next((dtype for dtype in NVFP4_TYPES if columns % BLOCK_TYPES[dtype].numbers == 0), "int8_16")
        return Matrix(name, rows, columns, dtype, parts, partial(self._make, dtype))

    def _make(self, dtype: str, codes: Bytes, scales: Bytes, factors: Floats) -> Bytes | CodedMatrix:
        factor = np.float32(factors.reshape(-1)[0])
        if factor < 0 or (factor == 0 and self.divides):
            range_words = "a positive number" if self.divides else "a number that is not negative"
            raise CheckpointError(f"{self.factor}: got {factor}; allowed: {range_words}")
        if dtype in NVFP4_TYPES:
            return pack_nvfp4(dtype, codes, scales, float(-factor if self.divides else factor))
        numbers = np.stack([E2M1[codes & np.uint8(15)], E2M1[codes >> np.uint8(4)]], axis=2)
        halves = TABLES["e4m3"][scales]
        halves = (halves / factor if self.divides else halves * factor) * np.float32(0.5)
        return CodedMatrix(numbers.reshape(len(codes), -1), halves)


@dataclass(frozen=True)
class PackedMxfp4:
    """Two codes a byte [rows, columns / 2], the first in the low half, and exponents [rows, columns / 32]."""

    codes: str
    """The last part of the name of the tensor with codes."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        if kinds(f"{name}.{self.codes}") != "U8" or kinds(f"{name}.weight_scale") == "F8_E4M3":
            return None
        _check_columns(name, columns, 32, "MXFP4")
        parts = (
            Part(f"{name}.{self.codes}", ("U8",), (rows, columns // 2)),
            Part(f"{name}.weight_scale", ("U8",), (rows, columns // 32)),
        )
        return Matrix(name, rows, columns, "mxfp4_e8m0", parts, _make_mxfp4)


def _make_mxfp4(packed_codes: Bytes, exponents: Bytes) -> Bytes:
    return mxfp4.pack_blocks(packed_codes.reshape(*exponents.shape, 16), exponents)


def _check_columns(name: str, columns: int, group: int, form: str) -> None:
    if columns % group:
        problem = f"got rows of {columns}; allowed in {form}: multiples of {group}"
        raise CheckpointError(f"tensor {name}: {problem}")
