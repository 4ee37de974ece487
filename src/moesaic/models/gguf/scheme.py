"""How a GGUF file stores matrices that moesaic looks for: quantised, split, or in another order of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.kernels.quantized import dequantize, pack
from moesaic.models.config import Fields
from moesaic.models.gguf.blocks import BLOCKS, NUMBERS, decoded
from moesaic.models.quantization.scheme import Array, Coded, Floats, Kinds, Matrix, Part

EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
BIASES = re.compile(r"(.+\.experts)\.(\d+)\.(gate_up|down)_proj_bias")
FUSED = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Word of a matrix -> its place in a tensor with gates and ups."""


@dataclass(frozen=True)
class Gguf:
    """The matrices of a GGUF file that are not plain numbers in moesaic's own order."""

    permuted: tuple[int, int] | None = None
    """Query and key heads, if the rows of these heads stand in another order in the file."""
    dtype = "float32"

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        kind = kinds(f"{name}.weight")
        if kind is not None:
            return self._plain(name, rows, columns, kind)
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            return self._expert(name, expert, rows, columns, kinds)
        if name.endswith(".kv_b_proj"):
            return self._halves(name, rows, columns, kinds)
        return None

    def vector(self, name: str, size: int, kinds: Kinds, /) -> Matrix | None:
        """The biases of an expert: those of gate and up in turn, or that of down. Those of permuted heads."""
        heads = self._heads(name.removesuffix(".bias"))
        kind = kinds(name) if heads is not None and name.endswith(".bias") else None
        if kind in NUMBERS and heads is not None:
            order = _own_order(name, size, heads)
            part = Part(name, tuple(NUMBERS), (size,))
            return Matrix(name, 1, size, "float32", (part,), partial(_make, "F32", order))
        found = BIASES.fullmatch(name)
        if found is None or kinds(f"{found[1]}.down_proj.bias") is None:
            return None
        words = ("gate_proj", "up_proj") if found[3] == "gate_up" else ("down_proj",)
        shape, index = (-1, size // len(words)), (int(found[2]),)
        parts = tuple(Part(f"{found[1]}.{word}.bias", tuple(NUMBERS), shape, index) for word in words)
        return Matrix(name, 1, size, "float32", parts, _in_turn)

    def _heads(self, name: str) -> int | None:
        """Heads of a projection whose rows stand in another order in the file; None for all others."""
        if self.permuted is None or not name.endswith((".q_proj", ".k_proj")):
            return None
        return self.permuted[name.endswith(".k_proj")]

    def _plain(self, name: str, rows: int, columns: int, kind: str) -> Matrix | None:
        heads = self._heads(name)
        if heads is None and kind in NUMBERS:
            return None
        part = Part(f"{name}.weight", (kind,), (rows, columns))
        order = None if heads is None else _own_order(name, rows, heads)
        dtype = "float32" if kind in NUMBERS else BLOCKS[kind].dtype
        return Matrix(name, rows, columns, dtype, (part,), partial(_make, kind, order))

    def _expert(
        self, name: str, found: re.Match[str], rows: int, columns: int, kinds: Kinds
    ) -> Matrix | None:
        prefix, expert, word = found.groups()
        tensor, shape, index = f"{prefix}.{word}.weight", (-1, rows, columns), (int(expert), slice(None))
        if kinds(tensor) is None and word in FUSED:
            tensor, shape = f"{prefix}.gate_up_proj", (-1, 2 * rows, columns)
            index = int(expert), slice(FUSED[word] * rows, (FUSED[word] + 1) * rows)
        kind = kinds(tensor)
        if kind is None or kind in NUMBERS:
            return None
        part = Part(tensor, (kind,), shape, index)
        return Matrix(name, rows, columns, BLOCKS[kind].dtype, (part,), partial(_make, kind, None))

    def _halves(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        """The projection of the latent to keys and values, which newer files have in two tensors."""
        key, value = (f"{name.removesuffix('kv_b_proj')}{word}_b_proj.weight" for word in "kv")
        types = kinds(key), kinds(value)
        if types[0] is None or types[1] is None:
            return None
        parts = Part(key, (types[0],), (-1, columns, -1)), Part(value, (types[1],), (-1, -1, columns))
        return Matrix(name, rows, columns, "float32", parts, partial(_joined, rows, types[0], types[1]))


def _make(kind: str, order: npt.NDArray[np.int64] | None, stored: Array) -> Coded | Floats:
    if kind in NUMBERS:
        return stored if order is None else stored[order]
    codes, scales, offsets = decoded(kind, stored if order is None else stored[order])
    return Coded(codes, scales, offsets)


def _own_order(name: str, rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where our rows are in the file. There the two of a pair are neighbours, here half a head is between."""
    if not heads or rows % (2 * heads):
        raise CheckpointError(f"tensor {name}: got {rows} rows; allowed: a multiple of {2 * heads}")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _in_turn(*biases: Floats) -> Floats:
    return np.stack([one.reshape(-1) for one in biases], axis=-1).reshape(-1)


def _joined(rows: int, of_key: str, of_value: str, key: Array, value: Array) -> Floats:
    """key [heads, rank, n], value [heads, v, rank] -> [heads * (n + v), rank]."""
    keys, values = _numbers(of_key, key), _numbers(of_value, value)
    if len(keys) != len(values) or len(keys) * (keys.shape[2] + values.shape[1]) != rows:
        shapes = f"{list(keys.shape)} and {list(values.shape)}"
        raise CheckpointError(f"weight: got {shapes}; allowed: together {rows} rows")
    joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return np.ascontiguousarray(joined.reshape(rows, -1))


def _numbers(kind: str, stored: Array) -> Floats:
    """The numbers of a tensor [a, b, c] of any type."""
    if kind in NUMBERS:
        found: Floats = stored
        return found
    codes, scales, offsets = decoded(kind, stored.reshape(-1, stored.shape[-1]))
    dtype, columns = BLOCKS[kind].dtype, codes.shape[1]
    return dequantize(dtype, pack(dtype, codes, scales, offsets), columns).reshape(
        *stored.shape[:-1], columns
    )


def parse(fields: Fields) -> Gguf:
    """Reads the quantization_config that `model.Model.config` writes."""
    fields.ignore("quant_method")
    heads: Any = fields.integers("permuted_heads")
    fields.done()
    return Gguf((heads[0], heads[1]) if len(heads) == 2 else None)
