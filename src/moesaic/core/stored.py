"""The dtypes that weights are stored in, and the bytes of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
COMPRESSED = "compressed"
"""bf16 in 12 bits a number, without loss; see `row_bytes`."""
QUANT_METHOD = "moesaic-compressed"
"""The quant_method in the config.json of a checkpoint with compressed experts."""
OF_EXPERTS = ("bfloat16", "float32", COMPRESSED)
"""Dtypes that the native kernels compute experts from, in the order of `Stored` in table.h."""

BLOCK = 1024
"""Numbers of a compressed row that share a head. The last block of a row may be shorter."""
HEAD = 64
"""Bytes of a head."""
GROUP = 64
"""Numbers whose bytes are stored together. A row has whole groups; the last one is padded."""
GROUP_BYTES = GROUP + GROUP // 2


def unquantized(config: Mapping[str, Any]) -> bool:
    """True if a config.json has no quantization, or only compression, which loses nothing."""
    told = config.get("quantization_config")
    return told is None or (isinstance(told, dict) and told.get("quant_method") == QUANT_METHOD)


def row_bytes(dtype: str, numbers: int) -> int:
    """Bytes of a matrix row with this many numbers.

    >>> row_bytes("bfloat16", 1024), row_bytes("compressed", 1024), row_bytes("compressed", 1025)
    (2048, 1600, 1760)
    """
    if dtype != COMPRESSED:
        return numbers * NUMBER_BYTES[dtype]
    blocks, rest = divmod(numbers, BLOCK)
    whole = blocks * (HEAD + BLOCK // GROUP * GROUP_BYTES)
    return whole + (HEAD + -(-rest // GROUP) * GROUP_BYTES if rest else 0)
