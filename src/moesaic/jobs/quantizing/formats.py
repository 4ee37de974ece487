"""How a quantised matrix is written: the layout `pack-quantized` of compressed-tensors, symmetric.

A matrix `NAME.weight` [rows, columns] becomes `NAME.weight_packed`, `NAME.weight_scale` and
`NAME.weight_shape`. A number is scale * (code - 2^(bits - 1)). `models/quantization/compressed_tensors.py`
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError

UNIT = 32
"""moesaic's kernels have a scale for so many numbers, so a group is a multiple of it."""
GROUPS = (128, 64, 32)
"""Numbers of a group of int4, if no size is given: the first that divides all rows."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantised matrix."""

    codes: npt.NDArray[np.uint8]
    """[rows, columns]"""
    scales: npt.NDArray[np.float32]
    """[rows, groups], numbers that the type of the file's scales has."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the new files."""

    name: str
    dtype: str
    """Type of the numbers, as safetensors calls it."""
    shape: tuple[int, ...]
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class Format:
    """int8 or int4, with a scale for each group of a row."""

    bits: int
    group: int | None
    """Numbers of a group. None: a row is a group."""

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def groups(self, columns: int) -> int:
        """Groups of a row."""
        return 1 if self.group is None else columns // self.group

    def tensors(self, module: str, rows: int, columns: int, scales: str) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors of a matrix: codes, scales and shape. scales: the type of scales in the file."""
        words, groups, width = (
            -(-columns * self.bits // 32),
            self.groups(columns),
            4 if scales == "F32" else 2,
        )
        return (
            Tensor(f"{module}.weight_packed", "I32", (rows, words), 4 * rows * words),
            Tensor(f"{module}.weight_scale", scales, (rows, groups), width * rows * groups),
            Tensor(f"{module}.weight_shape", "I64", (2,), 16),
        )

    def encode(self, matrix: QuantizedMatrix, scales: str) -> tuple[bytes, bytes, bytes]:
        """The bytes of the three tensors."""
        shape = np.array(matrix.codes.shape, dtype="<i8")
        return self._words(matrix.codes), as_bytes(matrix.scales, scales), shape.tobytes()

    def config(self, ignored_modules: Sequence[str]) -> dict[str, Any]:
        """The quantization_config of config.json. ignored_modules: those whose matrix stays as it was."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": None,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored_modules),
            "kv_cache_scheme": None,
        }

    def _words(self, codes: npt.NDArray[np.uint8]) -> bytes:
        """Words of 32 bits, the first code in the lowest bits. A row's last word is padded with zeros."""
        padded_codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // self.bits))))
        if self.bits == 4:
            padded_codes = padded_codes[:, 0::2] | padded_codes[:, 1::2] << np.uint8(4)
        return padded_codes.tobytes()


def choose_format(name: str, group: int | None, columns: Iterable[int]) -> Format:
    """The format of --format and --group-size for matrices with rows of these numbers of columns.

    Raises ConfigError for groups that do not divide them.
    """
    bits = 4 if name == "int4" else 8
    if group is None and bits == 8:
        return Format(bits, None)
    widths = sorted(set(columns))
    for size in GROUPS if group is None else (group,):
        if size % UNIT == 0 and all(width % size == 0 for width in widths):
            return Format(bits, size)
    fitting = [
        candidate
        for candidate in range(UNIT, min(widths) + 1, UNIT)
        if not any(columns_per_row % candidate for columns_per_row in widths)
    ]
    rows = f"rows of {', '.join(map(str, widths))} numbers"
    allowed_values = f"{', '.join(map(str, fitting))}, which divide {rows}"
    if not fitting:
        allowed_values = f"none: no multiple of {UNIT} divides {rows}; --format int8 needs no groups"
    raise ConfigError(f"--group-size: got {group or 'nothing'}; allowed: {allowed_values}")


def round_scales(scales: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """Scales rounded to a type of the file. One that would be zero is 1."""
    rounded_scales = np.frombuffer(
        as_bytes(scales, kind), dtype={"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]
    )
    if kind == "BF16":
        rounded_scales = (rounded_scales.astype(np.uint32) << 16).view(np.float32)
    values = rounded_scales.astype(np.float32).reshape(scales.shape)
    return np.where(values == 0, np.float32(1), values)


def as_bytes(numbers: npt.NDArray[np.float32], kind: str) -> bytes:
    """Numbers rounded to a type of the file, F32, F16 or BF16."""
    if kind == "F32":
        return numbers.astype("<f4").tobytes()
    if kind == "F16":
        return numbers.astype("<f2").tobytes()
    # Rounds to nearest, and halves to even: the lowest bit that is kept is added, too.
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded_bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded_bits.astype("<u2").tobytes()
