"""The types in which weights are stored, and the bytes of a row in each.

Question: Which types can weights have?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPRESSED_DTYPE = "compressed"
"""bf16 in 12 bits a number, without loss. See `row_bytes`."""
QUANT_METHOD = "moesaic-compressed"
"""The quantization method in the config.json of a checkpoint with compressed routed experts."""


@dataclass(frozen=True)
class Quantization:
    """A type of quantised weights. A number is scale * value, or scale * value + offset.

    Numbers of a row that share a scale are a group. `csrc/quantized.h` describes how a row is stored.
    """

    values: str
    """What a code means: "e4m3", "int8", "uint8", "int4", "uint4" or "e2m1"."""
    group: int
    """Numbers of a group."""
    offset: bool = False
    """Whether each group has an offset."""

    @property
    def integer(self) -> bool:
        """Whether a value is an integer."""
        return self.values in ("int8", "uint8", "int4", "uint4")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.values in ("e4m3", "int8", "uint8") else 4

    def row_bytes(self, numbers: int) -> int:
        """Bytes of a row. Each group has float32 numbers for its scale and offset; the last one is padded."""
        return -(-numbers // self.group) * (4 * (1 + self.offset) + self.group * self.bits // 8)


QUANTIZATIONS = {
    "fp8": Quantization("e4m3", 128),
    "int8": Quantization("int8", 32),
    "int8_offset": Quantization("uint8", 32, offset=True),
    "int4": Quantization("int4", 32),
    "int4_offset": Quantization("uint4", 32, offset=True),
    "mxfp4": Quantization("e2m1", 32),
    "int8_16": Quantization("int8", 16),
}
"""The types of quantised weights by name."""
PACKED_DTYPES = (COMPRESSED_DTYPE, *QUANTIZATIONS)
"""Types whose rows are bytes, and not numbers."""
NATIVE_DTYPES = ("bfloat16", "float32", *PACKED_DTYPES)
"""Types of expert weights that the native kernels read, in the order of table.h's `Stored`."""
DTYPE_SEPARATOR = "+"
"""Between two quantised types: the first of gate and up, the second of down, as in "int4_offset+int8_16"."""


def split_dtype(dtype: str) -> tuple[str, str]:
    """The type of an expert's gate and up, and that of its down.

    >>> split_dtype("int8"), split_dtype("int4_offset+int8_16")
    (('int8', 'int8'), ('int4_offset', 'int8_16'))
    """
    inner_dtype, _, down_dtype = dtype.partition(DTYPE_SEPARATOR)
    return inner_dtype, down_dtype or inner_dtype


def join_dtypes(inner_dtype: str, down_dtype: str) -> str:
    """The type of experts whose gate and up have one type, and down another or the same."""
    return inner_dtype if inner_dtype == down_dtype else f"{inner_dtype}{DTYPE_SEPARATOR}{down_dtype}"


def is_packed(dtype: str) -> bool:
    """Whether rows of experts of this type are bytes, and not numbers."""
    return all(one in PACKED_DTYPES for one in split_dtype(dtype))


def is_integer(dtype: str) -> bool:
    """Whether every number of experts of this type is an integer times a scale, plus an offset perhaps.

    >>> is_integer("int8"), is_integer("int4_offset+int8_16"), is_integer("mxfp4+int8"), is_integer("fp8")
    (True, True, False, False)
    """
    return all(one in QUANTIZATIONS and QUANTIZATIONS[one].integer for one in split_dtype(dtype))


def is_native(dtype: str) -> bool:
    """Whether the native kernels can read experts of this type."""
    return all(one in NATIVE_DTYPES for one in split_dtype(dtype))


def expert_code(dtype: str) -> int:
    """How the compiled module is told a type of experts.

    It is the index in NATIVE_DTYPES. If down has another type than gate and up, 256 times one more than that
    one's index is added.
    """
    inner_index, down_index = map(NATIVE_DTYPES.index, split_dtype(dtype))
    return inner_index if inner_index == down_index else inner_index + 256 * (down_index + 1)


BLOCK = 1024
"""Numbers of a compressed or quantised row that are stored together. A row's last block may be shorter."""
HEAD = 64
"""Bytes of a block's head."""
GROUP = 64
"""Numbers whose bytes are stored together. The last group of a row is padded to full size."""
GROUP_BYTES = GROUP + GROUP // 2


def is_unquantized(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names no quantization, or only moesaic's compression, which loses nothing."""
    quantization = config.get("quantization_config")
    return quantization is None or (
        isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD
    )


def row_bytes(dtype: str, numbers: int) -> int:
    """Bytes of a matrix row with so many numbers.

    >>> row_bytes("bfloat16", 1024), row_bytes("compressed", 1024), row_bytes("compressed", 1025)
    (2048, 1600, 1760)
    >>> row_bytes("fp8", 1024), row_bytes("int4", 1024), row_bytes("int4_offset", 1025)
    (1056, 640, 792)
    """
    if dtype in QUANTIZATIONS:
        return QUANTIZATIONS[dtype].row_bytes(numbers)
    if dtype != COMPRESSED_DTYPE:
        return numbers * NUMBER_BYTES[dtype]
    blocks, remainder = divmod(numbers, BLOCK)
    block_bytes = blocks * (HEAD + BLOCK // GROUP * GROUP_BYTES)
    return block_bytes + (HEAD + -(-remainder // GROUP) * GROUP_BYTES if remainder else 0)
