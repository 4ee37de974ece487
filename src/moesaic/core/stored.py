"""Types that weights are stored in, and what a row of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPRESSED = "compressed"
"""bf16 in 12 bits a number, without loss: see `row_bytes`."""
QUANT_METHOD = "moesaic-compressed"
"""What config.json calls a checkpoint whose routed experts are so."""
OF_EXPERTS = ("bfloat16", "float32", COMPRESSED)
"""Types that native kernels compute experts from, in the order of table.h's `Stored`."""

BLOCK = 1024
"""Numbers of a compressed row that have a head in common; the last block of a row may be shorter."""
HEAD = 64
"""Bytes of it."""
GROUP = 64
"""Numbers whose bytes stand together: whole groups, the last one filled up."""
GROUP_BYTES = GROUP + GROUP // 2


def unquantized(config: Mapping[str, Any]) -> bool:
    """Whether a config.json speaks of no quantization, or of compression alone, which loses nothing."""
    told = config.get("quantization_config")
    return told is None or (isinstance(told, dict) and told.get("quant_method") == QUANT_METHOD)


def row_bytes(dtype: str, numbers: int) -> int:
    """Bytes of so many numbers that are a matrix's row.

    >>> row_bytes("bfloat16", 1024), row_bytes("compressed", 1024), row_bytes("compressed", 1025)
    (2048, 1600, 1760)
    """
    if dtype != COMPRESSED:
        return numbers * NUMBER_BYTES[dtype]
    blocks, rest = divmod(numbers, BLOCK)
    whole = blocks * (HEAD + BLOCK // GROUP * GROUP_BYTES)
    return whole + (HEAD + -(-rest // GROUP) * GROUP_BYTES if rest else 0)
