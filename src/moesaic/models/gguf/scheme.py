"""How a GGUF file stores matrices that moesaic looks for: quantised, split, or in another order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import BLOCK_TYPES
from moesaic.kernels import blocks
from moesaic.models.config import Fields
from moesaic.models.gguf.blocks import BLOCKS, NUMBERS
from moesaic.models.gguf.pairs import find_common_type
from moesaic.models.quantization.scheme import Array, CodedMatrix, Floats, Kinds, Matrix, Part

EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
BIASES = re.compile(r"(.+\.experts)\.(\d+)\.(gate_up|down)_proj_bias")
FUSED = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Word of a matrix -> its place in a tensor with gates and ups."""
OF_CHANNELS = (".linear_attn.in_proj_qkv", ".linear_attn.in_proj_z", ".linear_attn.conv1d")
"""Tensors of linear attention whose last rows are those of value heads, one a channel."""
OF_HEADS = tuple(f".linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "decay", "dt_bias"))
"""Tensors of linear attention with one row for each value head."""
Order = npt.NDArray[np.int64]
Make = Callable[..., CodedMatrix | Array]
"""What `Matrix.make` is."""


@dataclass(frozen=True)
class Gguf:
    """The matrices of a GGUF file that are not plain numbers in moesaic's own order."""

    permuted_heads: tuple[int, int] | None = None
    """Query and key heads, if the rows of these heads stand in another order in the file."""
    has_norm_offset: bool = False
    """Whether one was added to the weights of norms, other than that of linear attention's output."""
    linear: tuple[int, int, int] | None = None
    """Key heads and value heads of linear attention, and the width of a value head."""
    has_tiled_heads: bool = False
    """Whether the file has first one value head of each key head, then the next of each."""

    def find(self, name: str, rows: int, columns: int, kinds: Kinds, /) -> Matrix | None:
        kind = kinds(f"{name}.weight")
        if kind is not None:
            return self._plain(name, rows, columns, kind, kinds)
        if name.endswith(".in_proj_qkvz"):
            return self._by_head(name, rows, columns, kinds)
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            return self._expert(name, expert, rows, columns, kinds)
        if name.endswith(".kv_b_proj"):
            return self._halves(name, rows, columns, kinds)
        return None

    def find_tensor(self, name: str, shape: Sequence[int], kinds: Kinds, /) -> Matrix | None:
        """A tensor that is no matrix, where the file has other numbers than ours, or another order.

        The biases of an expert: those of gate and up in turn, or that of down. Those of permuted heads.
        Norms, and what linear attention has for each value head or channel.
        """
        kind, size = kinds(name), math.prod(shape)
        if kind in NUMBERS:
            order = self._order(name.removesuffix(".weight").removesuffix(".bias"), shape[0])
            subtracts_one = (
                self.has_norm_offset and name.endswith("norm.weight") and ".linear_attn." not in name
            )
            if order is None and not subtracts_one:
                return None
            part = Part(name, tuple(NUMBERS), tuple(shape))
            return Matrix(
                name,
                1,
                size,
                "float32",
                (part,),
                _subtract_one if subtracts_one else partial(_reorder_rows, order),
            )
        match = BIASES.fullmatch(name)
        if match is None or kinds(f"{match[1]}.down_proj.bias") is None:
            return None
        words = ("gate_proj", "up_proj") if match[3] == "gate_up" else ("down_proj",)
        half, index = (-1, size // len(words)), (int(match[2]),)
        parts = tuple(Part(f"{match[1]}.{word}.bias", tuple(NUMBERS), half, index) for word in words)
        is_stored = all(kinds(part.tensor) == "F32" for part in parts)
        return Matrix(name, 1, size, "float32", parts, _interleave, is_stored=is_stored)

    def _order(self, name: str, rows: int) -> Order | None:
        """Where our rows of a tensor are in the file; None: in the same places."""
        if self.permuted_heads is not None and name.endswith((".q_proj", ".k_proj")):
            return _own_order(name, rows, self.permuted_heads[name.endswith(".k_proj")])
        if self.has_tiled_heads and name.endswith((*OF_CHANNELS, *OF_HEADS)):
            return self._order_value_heads(name, rows, name.endswith(OF_HEADS))
        return None

    def _order_value_heads(self, name: str, rows: int, of_heads: bool = False) -> Order:
        """Where our rows of value heads are in the file. They are the last ones. of_heads: one row a head."""
        assert self.linear is not None
        keys, values, width = self.linear
        first = rows - values * (1 if of_heads else width)
        if not keys or values % keys or first < 0:
            raise CheckpointError(f"tensor {name}: got {rows} rows; allowed: those of {values} value heads")
        last = np.arange(first, rows).reshape(values // keys, keys, -1).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(first), last])

    def _plain(self, name: str, rows: int, columns: int, kind: str, kinds: Kinds) -> Matrix | None:
        part, common_type = Part(f"{name}.weight", (kind,), (rows, columns)), find_common_type(name, kinds)
        if common_type is not None:
            return _as_common_type(name, rows, columns, part, common_type)
        order, column_order = self._order(name, rows), None
        if self.has_tiled_heads and name.endswith(".linear_attn.out_proj"):
            column_order = self._order_value_heads(name, columns)
        if order is None and column_order is None and kind in NUMBERS:
            return None
        dtype, make = "float32" if kind in NUMBERS else BLOCKS[kind], _make_rows(order)
        if column_order is not None:
            dtype, make = _make_columns(kind, column_order)
        return Matrix(
            name,
            rows,
            columns,
            dtype,
            (part,),
            make,
            in_bf16=kind == "BF16",
            is_stored=order is None and column_order is None,
        )

    def _by_head(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        """Qwen3-Next's projection to query, key, value and gate, which newer files have in two tensors.

        Ours has the rows of one key head after those of another.
        """
        mixed_name, gate_name = f"{name}.mixed.weight", f"{name}.gate.weight"
        types = kinds(mixed_name), kinds(gate_name)
        if types[0] is None or types[1] is None or self.linear is None:
            return None
        parts = Part(mixed_name, (types[0],), (-1, columns)), Part(gate_name, (types[1],), (-1, columns))
        make = partial(_join_heads, self.linear[0], rows, types[0], types[1])
        alike = types[0] == types[1] and types[0] not in NUMBERS
        dtype = BLOCKS[types[0]] if alike else "float32"
        return Matrix(name, rows, columns, dtype, parts, make, in_bf16=types == ("BF16", "BF16"))

    def _expert(
        self, name: str, match: re.Match[str], rows: int, columns: int, kinds: Kinds
    ) -> Matrix | None:
        prefix, expert, word = match.groups()
        tensor, shape, index = f"{prefix}.{word}.weight", (-1, rows, columns), (int(expert), slice(None))
        if kinds(tensor) is None and word in FUSED:
            tensor, shape = f"{prefix}.gate_up_proj", (-1, 2 * rows, columns)
            index = int(expert), slice(FUSED[word] * rows, (FUSED[word] + 1) * rows)
        kind = kinds(tensor)
        if kind is None or kind in NUMBERS:
            return None
        part, common_type = Part(tensor, (kind,), shape, index), find_common_type(tensor, kinds)
        if common_type is not None:
            return _as_common_type(name, rows, columns, part, common_type)
        return Matrix(name, rows, columns, BLOCKS[kind], (part,), _keep, is_stored=True)

    def _halves(self, name: str, rows: int, columns: int, kinds: Kinds) -> Matrix | None:
        """The projection of the latent to keys and values, which newer files have in two tensors."""
        key, value = (f"{name.removesuffix('kv_b_proj')}{word}_b_proj.weight" for word in "kv")
        types = kinds(key), kinds(value)
        if types[0] is None or types[1] is None:
            return None
        parts = Part(key, (types[0],), (-1, columns, -1)), Part(value, (types[1],), (-1, -1, columns))
        return Matrix(
            name, rows, columns, "float32", parts, partial(_join_keys_and_values, rows, types[0], types[1])
        )


def _keep(array: Array) -> Array:
    return array


def _as_common_type(name: str, rows: int, columns: int, part: Part, dtype: str) -> Matrix:
    """A gate or an up in a type that holds its numbers, and those of its partner."""
    block_type = BLOCKS[part.dtypes[0]]

    def make(array: Array) -> CodedMatrix:
        return CodedMatrix(*blocks.decode_as(dtype, block_type, array))

    return Matrix(name, rows, columns, dtype, (part,), make)


def _make_rows(order: Order | None) -> Make:
    """Makes a matrix whose rows stand in another order in the file. Blocks stay as they are."""
    return _keep if order is None else partial(_reorder_rows, order)


def _reorder_rows(order: Order | None, array: Array) -> Array:
    return array if order is None else array[order]


def _make_columns(kind: str, order: Order) -> tuple[str, Make]:
    """The type of a matrix whose columns stand in another order in the file, and what makes it.

    If whole blocks move, they stay as they are. If only whole groups of numbers with one scale move, the
    matrix is converted to a type of such groups. Else it becomes float32.
    """
    if kind in NUMBERS:
        return "float32", partial(_reorder_columns, kind, order)
    dtype, block = BLOCKS[kind], BLOCK_TYPES[BLOCKS[kind]]
    moved_blocks = _whole_groups(order, block.numbers)
    if moved_blocks is not None:
        return dtype, partial(_reorder_blocks, moved_blocks)
    moved_groups = _whole_groups(order, block.group)
    if moved_groups is not None:
        return block.conversion, partial(_reorder_groups, dtype, order, moved_groups)
    return "float32", partial(_reorder_columns, kind, order)


def _reorder_columns(kind: str, order: Order, array: Array) -> Floats:
    """The numbers of a matrix whose columns stand in another order in the file."""
    reordered: Floats = _numbers(kind, array)[:, order]
    return reordered


def _whole_groups(order: Order, size: int) -> Order | None:
    """Where our groups of `size` columns are in the file, if `order` only moves whole ones; else None."""
    firsts = order[::size]
    expected_order = (firsts[:, None] + np.arange(size)).reshape(-1)
    return firsts // size if not (firsts % size).any() and np.array_equal(order, expected_order) else None


def _reorder_blocks(blocks_of_row: Order, array: Array) -> Array:
    """The blocks of each row in another order."""
    rows = len(array)
    row_blocks: Array = array.reshape(rows, len(blocks_of_row), -1)[:, blocks_of_row]
    return row_blocks.reshape(rows, -1)


def _reorder_groups(dtype: str, order: Order, groups: Order, array: Array) -> CodedMatrix:
    """The codes of a quantised matrix of which whole groups of columns stand in another order."""
    codes, scales, offsets = blocks.decode_rows(dtype, array)
    return CodedMatrix(codes[:, order], scales[:, groups], None if offsets is None else offsets[:, groups])


def _subtract_one(weights: Array) -> Floats:
    """Weights of a norm that one was added to. Adding it again gives the same bits."""
    difference: Floats = weights - np.float32(1.0)
    return difference


def _join_heads(
    heads: int, rows: int, mixed_kind: str, gate_kind: str, mixed_rows: Array, gate_rows: Array
) -> Array:
    """mixed [queries + keys + values, h], gate [values, h] -> [rows, h], head by head."""
    width = (len(mixed_rows) - len(gate_rows)) // 2
    if (
        not heads
        or len(mixed_rows) + len(gate_rows) != rows
        or width < 0
        or width % heads
        or len(gate_rows) % heads
    ):
        got = f"got {len(mixed_rows)} and {len(gate_rows)} rows"
        problem = f"{got}; allowed: together {rows} rows of {heads} key heads"
        raise CheckpointError(f"weight: {problem}")
    parts = np.split(np.arange(rows), [width, 2 * width, len(mixed_rows)])
    order = np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)
    if mixed_kind == gate_kind:
        return _reorder_rows(order, np.concatenate([mixed_rows, gate_rows]))
    return _reorder_rows(
        order, np.concatenate([_numbers(mixed_kind, mixed_rows), _numbers(gate_kind, gate_rows)])
    )


def _own_order(name: str, rows: int, heads: int) -> Order:
    """Where our rows are in the file. There the two of a pair are neighbours, here half a head is between."""
    if not heads or rows % (2 * heads):
        raise CheckpointError(f"tensor {name}: got {rows} rows; allowed: a multiple of {2 * heads}")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _interleave(*biases: Floats) -> Floats:
    return np.stack([bias.reshape(-1) for bias in biases], axis=-1).reshape(-1)


def _join_keys_and_values(rows: int, of_key: str, of_value: str, key: Array, value: Array) -> Floats:
    """key [heads, rank, n], value [heads, v, rank] -> [heads * (n + v), rank]."""
    keys, values = _numbers(of_key, key), _numbers(of_value, value)
    if len(keys) != len(values) or len(keys) * (keys.shape[2] + values.shape[1]) != rows:
        shapes = f"{list(keys.shape)} and {list(values.shape)}"
        raise CheckpointError(f"weight: got {shapes}; allowed: together {rows} rows")
    matrix = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return np.ascontiguousarray(matrix.reshape(rows, -1))


def _numbers(kind: str, array: Array) -> Floats:
    """The numbers of a tensor [.., c] of any type."""
    if kind in NUMBERS:
        numbers: Floats = array
        return numbers
    rows = blocks.dequantize(BLOCKS[kind], array.reshape(-1, array.shape[-1]))
    return rows.reshape(*array.shape[:-1], -1)


def parse(fields: Fields) -> Gguf:
    """Reads the quantization_config that `model.Model.config` writes."""
    fields.ignore("quant_method")
    heads, linear = fields.integers("permuted_heads"), fields.integers("linear_heads")
    has_norm_offset, has_tiled_heads = fields.flag("one_added", False), fields.flag("tiled_heads", False)
    fields.refuse_unread()
    return Gguf(
        permuted_heads=(heads[0], heads[1]) if len(heads) == 2 else None,
        has_norm_offset=has_norm_offset,
        linear=(linear[0], linear[1], linear[2]) if len(linear) == 3 else None,
        has_tiled_heads=has_tiled_heads,
    )
