"""The types of tensors in GGUF files. `kernels/blocks.py` computes the numbers of quantised ones."""

from __future__ import annotations

from moesaic.core.weight_types import BLOCK_TYPES

NUMBERS = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of plain numbers -> bytes of one."""
NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Number in a file -> name of the type."""
BLOCKS = {
    name: "mxfp4_e8m0" if name == "MXFP4" else name.lower()
    for name in NAMES.values()
    if name == "MXFP4" or name.lower() in BLOCK_TYPES
}
"""The quantised types that are read -> their names in `core.weight_types.BLOCK_TYPES`."""
ALLOWED = (*NUMBERS, *BLOCKS)


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row. Raises ValueError if it is no whole number of blocks."""
    if kind in NUMBERS:
        return columns * NUMBERS[kind]
    block = BLOCK_TYPES[BLOCKS[kind]]
    if columns % block.numbers:
        raise ValueError(f"rows of {columns} {kind} numbers; allowed: multiples of {block.numbers}")
    return block.row_bytes(columns)
