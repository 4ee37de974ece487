"""The types in which weights are stored, and the bytes of a row in each.

Question: Which types can weights have?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    "int8_16_offset": Quantization("uint8", 16, offset=True),
}
"""The types of quantised weights by name."""


@dataclass(frozen=True)
class BlockType:
    """A type of quantised weights whose rows are blocks, each with its codes and scales.

    A number is scale * value, or scale * value + offset, as in a `Quantization`. `kernels/blocks.py` reads
    it.
    """

    numbers: int
    """Numbers of a block."""
    size: int
    """Bytes of a block."""
    group: int
    """Numbers that share a scale."""
    conversion: str
    """The type of QUANTIZATIONS that holds the same numbers, for kernels that read no blocks."""

    def row_bytes(self, numbers: int) -> int:
        """Bytes of a row. Raises ValueError for a row that is no whole number of blocks."""
        if numbers % self.numbers:
            raise ValueError(f"rows of {numbers} numbers; allowed: multiples of {self.numbers}")
        return numbers // self.numbers * self.size


BLOCK_TYPES = {
    "q8_0": BlockType(32, 34, 32, "int8"),
    "q4_0": BlockType(32, 18, 32, "int4"),
    "q4_1": BlockType(32, 20, 32, "int4_offset"),
    "q5_0": BlockType(32, 22, 32, "int8"),
    "q5_1": BlockType(32, 24, 32, "int8_offset"),
    "q2_k": BlockType(256, 84, 16, "int8_16_offset"),
    "q3_k": BlockType(256, 110, 16, "int8_16"),
    "q4_k": BlockType(256, 144, 32, "int4_offset"),
    "q5_k": BlockType(256, 176, 32, "int8_offset"),
    "q6_k": BlockType(256, 210, 16, "int8_16"),
    "iq4_nl": BlockType(32, 18, 32, "int8"),
    "iq4_xs": BlockType(256, 136, 32, "int8"),
    "iq1_s": BlockType(256, 50, 32, "int8"),
    "iq1_m": BlockType(256, 56, 16, "int8_16"),
    "iq2_xxs": BlockType(256, 66, 32, "int8"),
    "iq2_xs": BlockType(256, 74, 16, "int8_16"),
    "iq2_s": BlockType(256, 82, 16, "int8_16"),
    "iq3_xxs": BlockType(256, 98, 32, "int8"),
    "iq3_s": BlockType(256, 110, 32, "int8"),
    "tq1_0": BlockType(256, 54, 32, "int8"),
    "tq2_0": BlockType(256, 66, 32, "int8"),
    "mxfp4_e8m0": BlockType(32, 17, 32, "mxfp4"),
    "int4_g128": BlockType(128, 67, 32, "int4_offset"),
    "int4_g64": BlockType(64, 35, 32, "int4_offset"),
    "int4_g32": BlockType(32, 19, 32, "int4_offset"),
    "int8_g128": BlockType(128, 131, 32, "int8"),
    "int8_offset_g128": BlockType(128, 133, 32, "int8_offset"),
    "nvfp4_g128": BlockType(128, 76, 16, "int8_16"),
    "nvfp4_g64": BlockType(64, 40, 16, "int8_16"),
}
"""The types of blocks by name. Most are ggml's, as GGUF files have them, with ggml's name in small letters.
ggml's MXFP4 has "mxfp4_e8m0", since "mxfp4" has scales in float32.

Those of INTEGER_GROUP_TYPES are groups of GPTQ, AWQ and compressed-tensors: a byte, a scale of 16 bits, and
the codes. The low half of the byte is the zero point of "int4". Its highest bit says that the scale is bf16,
not float16. In "int8_offset_g128" the byte is the zero point, and the scale is a float32.

Those of NVFP4_TYPES are several groups of 16 numbers: a float32 for all of them, their scales in E4M3, and
the codes. Scales are multiplied by the float32, or divided by its magnitude if it is negative.
"""
INTEGER_GROUP_TYPES = ("int4_g128", "int4_g64", "int4_g32", "int8_g128", "int8_offset_g128")
NVFP4_TYPES = ("nvfp4_g128", "nvfp4_g64")
GROUP_TYPES = (*INTEGER_GROUP_TYPES, *NVFP4_TYPES)
"""The types of BLOCK_TYPES that no GGUF file has."""
PACKED_DTYPES = (COMPRESSED_DTYPE, *QUANTIZATIONS, *BLOCK_TYPES)
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

    >>> is_integer("int8"), is_integer("int4_offset+q6_k"), is_integer("mxfp4+int8"), is_integer("fp8")
    (True, True, False, False)
    """
    return all(
        one in BLOCK_TYPES or (one in QUANTIZATIONS and QUANTIZATIONS[one].integer)
        for one in split_dtype(dtype)
    )


def is_quantized(dtype: str) -> bool:
    """Whether a type of one matrix is quantised.

    >>> is_quantized("q4_k"), is_quantized("fp8"), is_quantized("compressed")
    (True, True, False)
    """
    return dtype in QUANTIZATIONS or dtype in BLOCK_TYPES


def convert_blocks(dtype: str) -> str:
    """The type of experts for kernels that read no blocks: that of QUANTIZATIONS with the same numbers.

    >>> convert_blocks("q4_k+q6_k"), convert_blocks("q2_k"), convert_blocks("fp8")
    ('int4_offset+int8_16', 'int8_16_offset', 'fp8')
    """
    types = [BLOCK_TYPES[name].conversion if name in BLOCK_TYPES else name for name in split_dtype(dtype)]
    return join_dtypes(*types)


def choose_common_type(types: Iterable[str]) -> str:
    """The smallest type of QUANTIZATIONS that holds the numbers of matrices of several types of BLOCK_TYPES.

    >>> choose_common_type(["q4_0", "q8_0"]), choose_common_type(["q4_0", "q4_k"])
    ('int8', 'int4_offset')
    >>> choose_common_type(["q4_k", "q6_k"]), choose_common_type(["q4_0", "mxfp4_e8m0"])
    ('int8_16_offset', 'int8')
    """
    conversions = {BLOCK_TYPES[dtype].conversion for dtype in types}
    if len(conversions) == 1:
        return conversions.pop()
    kinds = [QUANTIZATIONS[dtype] for dtype in conversions]
    bits = 4 if all(kind.values in ("int4", "uint4") for kind in kinds) else 8
    group = "_16" if any(kind.group == 16 for kind in kinds) else ""
    return f"int{bits}{group}{'_offset' if any(kind.offset for kind in kinds) else ''}"


def group_numbers(dtype: str) -> int:
    """Numbers of a row of a quantised type that cannot be told apart: those of a group, or of a block.

    >>> group_numbers("int8"), group_numbers("q4_k")
    (32, 256)
    """
    return BLOCK_TYPES[dtype].numbers if dtype in BLOCK_TYPES else QUANTIZATIONS[dtype].group


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
    >>> row_bytes("q4_k", 1024), row_bytes("q8_0", 32)
    (576, 34)
    """
    if dtype in BLOCK_TYPES:
        return BLOCK_TYPES[dtype].row_bytes(numbers)
    if dtype in QUANTIZATIONS:
        return QUANTIZATIONS[dtype].row_bytes(numbers)
    if dtype != COMPRESSED_DTYPE:
        return numbers * NUMBER_BYTES[dtype]
    blocks, remainder = divmod(numbers, BLOCK)
    block_bytes = blocks * (HEAD + BLOCK // GROUP * GROUP_BYTES)
    return block_bytes + (HEAD + -(-remainder // GROUP) * GROUP_BYTES if remainder else 0)
