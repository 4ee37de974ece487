"""MXFP4 as gpt-oss stores it: E2M1 numbers with a power of two for each 32, all experts in one tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.models.config import Fields
from moesaic.models.quantization.scheme import Bytes, Kinds, Matrix, Part

EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)")
WHERE = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2), 2),
    "up_proj": ("gate_up_proj", slice(1, None, 2), 2),
    "down_proj": ("down_proj", slice(None), 1),
}
"""Word of a matrix -> its tensor, its rows among those of its expert, and how many matrices share these."""


@dataclass(frozen=True)
class Mxfp4:
    """`X_blocks` [experts, rows, columns / 32, 16] bytes and `X_scales` [experts, rows, columns / 32].

    Rows of gate and up take turns. The low half of a byte is the even number.
    """

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        match = EXPERT.fullmatch(name)
        if match is None:
            return None
        prefix, expert, word = match.groups()
        tensor, expert_rows, count = WHERE[word]
        if kinds(f"{prefix}.{tensor}_blocks") is None:
            return None
        if columns % 32:
            raise CheckpointError(f"tensor {name}: got rows of {columns}; allowed in MXFP4: multiples of 32")
        shape, index = (-1, count * rows, columns // 32), (int(expert), expert_rows)
        parts = (
            Part(f"{prefix}.{tensor}_blocks", ("U8",), (*shape, 16), index),
            Part(f"{prefix}.{tensor}_scales", ("U8",), shape, index),
        )
        return Matrix(name, rows, columns, "mxfp4_e8m0", parts, pack_blocks)


def pack_blocks(packed_codes: Bytes, exponents: Bytes) -> Bytes:
    """The blocks. packed_codes: [rows, groups, 16] with the even number of two in a byte's low half, where
    blocks have the first 16 numbers of a group. exponents: [rows, groups]."""
    even_codes, odd_codes = packed_codes & np.uint8(15), packed_codes >> np.uint8(4)
    blocks = np.empty((*exponents.shape, 17), dtype=np.uint8)
    blocks[:, :, 0] = exponents
    blocks[:, :, 1::2] = even_codes[:, :, :8] | even_codes[:, :, 8:] << np.uint8(4)
    blocks[:, :, 2::2] = odd_codes[:, :, :8] | odd_codes[:, :, 8:] << np.uint8(4)
    return blocks.reshape(len(blocks), -1)


def parse(fields: Fields) -> Mxfp4:
    """Reads quantization_config with quant_method "mxfp4". The tensors say which matrices are quantised."""
    fields.ignore("quant_method", "modules_to_not_convert", "dequantize", "swizzle")
    fields.refuse_unread()
    return Mxfp4()
