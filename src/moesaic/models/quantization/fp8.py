"""FP8: E4M3 numbers with scales of blocks of 128 x 128 (DeepSeek-V3), of rows, or of the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.models.config import Fields, shorten
from moesaic.models.quantization.scheme import FLOATS, Bytes, CodedMatrix, Floats, Kinds, Matrix, Part

SUFFIXES = ("weight_scale_inv", "weight_scale")
"""Names of scales. A number is its code times the scale, whichever the name."""


@dataclass(frozen=True)
class Fp8:
    """Matrices [rows, columns] of F8_E4M3, and their scales."""

    block: tuple[int, int] | None
    """Rows and columns of a block; None: scales of rows or matrices."""
    powers: bool = False
    """Whether the config says that scales are powers of two. Then bf16 holds every number."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        if kinds(f"{name}.weight") != "F8_E4M3":
            return None
        suffix = next((suffix for suffix in SUFFIXES if kinds(f"{name}.{suffix}") is not None), SUFFIXES[0])
        codes = Part(f"{name}.weight", ("F8_E4M3",), (rows, columns))
        # A scale of each row, or one of the whole matrix. Programs write both in two shapes.
        shapes: tuple[tuple[int, ...], ...] = ((rows, 1), (rows,), (1,), ())
        if self.block is not None:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        scales = Part(f"{name}.{suffix}", FLOATS, shapes[0], shapes=shapes[1:])
        return Matrix(name, rows, columns, "fp8", (codes, scales), self._make, in_bf16=self.powers)

    def _make(self, codes: Bytes, scales: Floats) -> CodedMatrix:
        if self.block is None:
            return CodedMatrix(codes, np.broadcast_to(scales.reshape(-1, 1), (len(codes), 1)))
        rows, groups = len(codes), -(-codes.shape[1] // 128)
        of_row = np.arange(rows) // min(self.block[0], rows)
        of_group = np.arange(groups) // min(self.block[1] // 128, groups)
        return CodedMatrix(codes, scales[of_row][:, of_group])


def parse(fields: Fields) -> Fp8:
    """Reads quantization_config with quant_method "fp8". What is said of activations is not used."""
    fields.require_value("fmt", "e4m3", "float8_e4m3fn", None)
    fields.require_value("activation_scheme", "dynamic", "static", None)
    fields.ignore("modules_to_not_convert", "quant_method", "dequantize", "ignored_layers")
    fields.ignore("kv_cache_scheme")  # the cache has a type of its own
    powers = fields.raw("scale_fmt", None) == "ue8m0"
    block = fields.integers("weight_block_size")
    fields.refuse_unread()
    return Fp8(block_of(list(block), "weight_block_size") if block else None, powers)


def block_of(sizes: Any, key: str) -> tuple[int, int]:
    """Rows and columns of a block. key: where in quantization_config. Raises CheckpointError for others."""
    is_pair = isinstance(sizes, list) and [type(size) for size in sizes] == [int, int]
    if not is_pair or sizes[0] < 1 or sizes[1] < 1 or sizes[1] % 128:
        raise CheckpointError(
            f"config.json: quantization_config.{key}: got {shorten(repr(sizes))}; allowed: rows, and a "
            "multiple of 128 columns"
        )
    return sizes[0], sizes[1]
