"""The types in which weights are stored, and the bytes of a row in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPRESSED = "compressed"
"""bf16 in 12 bits a number, without loss. See `row_bytes`."""
QUANT_METHOD = "moesaic-compressed"
"""The quantization method in the config.json of a checkpoint with compressed routed experts."""
OF_EXPERTS = ("bfloat16", "float32", COMPRESSED)
"""Types of expert weights that the native kernels read, in the order of table.h's `Stored`."""

BLOCK = 1024
"""Numbers of a compressed row that share a head. The last block of a row may be shorter."""
HEAD = 64
"""Bytes of a block's head."""
GROUP = 64
"""Numbers whose bytes are stored together. The last group of a row is padded to full size."""
GROUP_BYTES = GROUP + GROUP // 2


def unquantized(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names no quantization, or only moesaic's compression, which loses nothing."""
    found = config.get("quantization_config")
    return found is None or (isinstance(found, dict) and found.get("quant_method") == QUANT_METHOD)


def row_bytes(dtype: str, numbers: int) -> int:
    """Bytes of a matrix row with so many numbers.

    >>> row_bytes("bfloat16", 1024), row_bytes("compressed", 1024), row_bytes("compressed", 1025)
    (2048, 1600, 1760)
    """
    if dtype != COMPRESSED:
        return numbers * NUMBER_BYTES[dtype]
    blocks, rest = divmod(numbers, BLOCK)
    whole = blocks * (HEAD + BLOCK // GROUP * GROUP_BYTES)
    return whole + (HEAD + -(-rest // GROUP) * GROUP_BYTES if rest else 0)
