"""Builds the parts of a model from tensor names in a checkpoint. The model files share this code.

Question: Which quantised matrices outside of the experts stay as they are stored?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import (
    BIASED_ROWS,
    COLUMNS,
    DOWN_COLUMNS,
    HALF_COLUMNS,
    ROWS,
    SILU,
    Activation,
    NamedShape,
    column_tensors,
)
from moesaic.core.weight_types import (
    COMPRESSED_DTYPE,
    is_integer,
    is_packed,
    is_quantized,
    join_dtypes,
    row_bytes,
    split_dtype,
)
from moesaic.kernels.matrix import QuantizedMatrix, Weight, dequantize_weight, kind_of, unify_dtypes
from moesaic.kernels.table import Kernels
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import Fields
from moesaic.models.layers import BiasedMLP, GatedMLP, GroupedQueryAttention, Projection
from moesaic.models.quantization.scheme import Matrix
from moesaic.models.rope import RopeConfig, RopeTable, rotary_width
from moesaic.models.shard import WHOLE, Shard

ROUNDED = 32
"""Numbers of a row that kernels of integers round with one scale (kLine of csrc/integers.h)."""


@dataclass(frozen=True)
class Loader:
    """Reads tensors of a checkpoint, and puts them on one device."""

    checkpoint: Checkpoint
    kernels: Kernels
    device: str
    dtype: torch.dtype
    """Data type of matrices. Vectors and gates are always float32."""
    shard: Shard = WHOLE
    """The tensor-parallel rank whose heads are read."""
    of_expert: Shard = WHOLE
    """The rank whose part of every routed expert's width is read."""
    scan: bool = True
    """Whether NaN and infinite numbers are looked for. Routed experts are most of a model and not scanned."""
    packed_dtype: str | None = None
    """The type of routed experts that are read as bytes, where `dtype` is uint8."""
    positions: int | None = None
    """Maximum tokens of a request, for which rotary tables are made. None: the model's own maximum."""

    def rope_table(self, config: RopeConfig, width: int, max_positions: int) -> RopeTable:
        """Returns the table for heads of `width` numbers. max_positions: the model's maximum of positions."""
        positions = max_positions if self.positions is None else min(max_positions, self.positions)
        return RopeTable.build(config, width, positions, self.device)

    def find_name(self, prefix: str, names: Sequence[str], ending: str = "") -> str:
        """Returns the first prefix.name that the files have with `ending` after it, or else the first of all.

        transformers writes a few parts by names of its own beside fused experts.
        """
        full = [f"{prefix}.{name}" for name in names]
        return next((full_name for full_name in full if full_name + ending in self.checkpoint.names), full[0])

    def weight(self, name: str, rows: int, columns: int, *part: slice) -> Weight:
        """Returns `name`.weight [rows, columns], or a part of it, for kernels that multiply by it.

        Quantised ones stay in the type in which they are stored, if the kernels read it. They become
        what `matrix` returns if a part begins or ends within a group of a row. Raises ConfigError for a part
        of which kernels of integers would round other numbers together than in the whole.
        """
        matrix = self.checkpoint.find_quantized(f"{name}.weight", rows, columns)
        if matrix is None or not self.kernels.can_use_quantized:
            return self.matrix(name, rows, columns, *part)
        dtype = matrix.choose_type(part, self.kernels.can_use_blocks)
        if self.kernels.is_integer and is_integer(matrix.dtype):
            self._refuse_split_groups(matrix, dtype, part)
        if dtype == "float32":
            return self.matrix(name, rows, columns, *part)
        stored_rows = self.checkpoint.tensor(
            f"{name}.weight",
            rows,
            columns,
            dtype=torch.uint8,
            device=self.device,
            part=part,
            packed_dtype=dtype,
        )
        num_columns = len(range(columns)[part[1]]) if len(part) > 1 else columns
        return QuantizedMatrix(stored_rows, num_columns, dtype)

    def _refuse_split_groups(self, matrix: Matrix, dtype: str, part: tuple[slice, ...]) -> None:
        """Raises ConfigError unless kernels of integers round the same numbers together in a part of type
        `dtype` as in the whole matrix."""
        if dtype == "float32" or not matrix.cuts(part, dtype, ROUNDED):
            groups = f"whole groups of {ROUNDED} columns of {matrix.name} with {self.kernels.name} kernels"
            raise ConfigError.field("--tensor-parallel-size", self.shard.size, f"ranks with {groups}")

    def matrix(
        self, name: str, rows: int, columns: int, *part: slice, packed_dtype: str | None = None
    ) -> torch.Tensor:
        """Returns `name`.weight [rows, columns], or a part of it. Quantised ones become float32 on a CPU.

        They become bf16 instead if that loses nothing. packed_dtype: as of `Checkpoint.tensor`.
        """
        dtype, narrow = self.dtype, False
        if dtype is not torch.uint8 and not self.device.startswith("cuda"):
            quantized_matrix = self.checkpoint.find_quantized(f"{name}.weight", rows, columns)
            narrow = dtype is torch.bfloat16 and quantized_matrix is not None and quantized_matrix.in_bf16
            # Without memory no numbers can be compared, so bytes are counted as if bf16 held them.
            counts_bytes = narrow and self.device == "meta"
            dtype = dtype if quantized_matrix is None or counts_bytes else torch.float32
        tensor = self.checkpoint.tensor(
            f"{name}.weight",
            rows,
            columns,
            dtype=dtype,
            device=self.device,
            part=part,
            scan=self.scan,
            packed_dtype=packed_dtype,
        )
        return _in_bf16(tensor) if narrow else tensor

    def expert_matrix(self, matrix: NamedShape, *part: slice) -> torch.Tensor:
        """Returns a part of an expert's matrix as it is stored."""
        return self.checkpoint.tensor(
            *matrix, dtype=self.dtype, device=self.device, part=part, scan=self.scan
        )

    def transpose_matrix(self, matrix: NamedShape, *part: slice) -> torch.Tensor:
        """Returns a part of an expert's matrix, transposed."""
        return self.checkpoint.tensor(
            *matrix,
            dtype=self.dtype,
            device=self.device,
            part=part,
            scan=self.scan,
            is_transposed=True,
        )

    def expert_vector(self, vector: NamedShape) -> torch.Tensor:
        """Returns a vector of an expert, in float32."""
        return self.checkpoint.tensor(*vector, dtype=torch.float32, device=self.device, scan=self.scan)

    def expert_type(self, names: ExpertNames) -> str:
        """Type of routed experts, a name of core/weight_types.py.

        Quantised ones stay so if the kernels support that. Compressed ones do if ranks do not share them.
        Raises ConfigError for kernels of integers where ranks share them.
        """
        if self.kernels.is_integer and self.of_expert.size > 1:
            allowed_sizes = f"1 with {self.kernels.name} kernels"
            raise ConfigError.field("--expert-tensor-parallel-size", self.of_expert.size, allowed_sizes)
        quantised_type = self._choose_quantised_type(names)
        if quantised_type is not None and is_packed(quantised_type):
            return quantised_type
        if quantised_type is not None and self.device.startswith("cpu"):
            return "float32"
        stays = self.of_expert.size == 1 and self.kernels.can_use_compressed
        stays = stays and quantised_type is None and self.dtype is torch.bfloat16
        if stays and self.checkpoint.dtype(names.list_tensors(0)[0][0]) is torch.uint8:
            return COMPRESSED_DTYPE
        return str(self.dtype).removeprefix("torch.")

    def _choose_quantised_type(self, names: ExpertNames) -> str | None:
        """Type in memory of quantised experts, or of the rank's part. None: they are not quantised."""
        file_type = quantised_experts(self.checkpoint, names)
        if file_type is None or self.of_expert.size == 1 or not self.kernels.can_use_quantized:
            return None if file_type is None else self.kernels.choose_quantized_type(file_type)
        rank_part, can_use_blocks = self.of_expert.part(names.width), self.kernels.can_use_blocks
        gate_matrix, down_matrix = find_expert_matrices(self.checkpoint, names)
        types = [
            matrix.choose_type(part, can_use_blocks)
            for matrix, part in ((gate_matrix, (rank_part,)), (down_matrix, (slice(None), rank_part)))
            if matrix is not None
        ]
        return "float32" if "float32" in types else join_dtypes(types[0], types[-1])

    def exact(self, name: str, *shape: int) -> torch.Tensor:
        """Returns tensor `name`, a full name, in float32."""
        return self.checkpoint.tensor(name, *shape, dtype=torch.float32, device=self.device)

    def projection(self, name: str, rows: int, columns: int, bias: bool = False) -> Projection:
        """Returns `name`.weight, and `name`.bias if `bias` is true."""
        return self.input_projection(name, rows, columns, slice(None), bias)

    def input_projection(
        self, name: str, rows: int, columns: int, kept_rows: slice, bias: bool = False
    ) -> Projection:
        """Returns the rows `kept_rows` of `name`.weight [rows, columns] and `name`.bias: those of some
        heads."""
        vector = self.exact(f"{name}.bias", rows)[kept_rows] if bias else None
        return Projection(self.weight(name, rows, columns, kept_rows), vector)

    def output_projection(
        self, name: str, rows: int, columns: int, kept_columns: slice, bias: bool = False
    ) -> Projection:
        """Returns the columns `kept_columns` of `name`.weight [rows, columns]: those of some heads.

        The results of all ranks add up to the result of the whole matrix. Only rank 0 has the bias, so that
        it counts once.
        """
        vector = self.exact(f"{name}.bias", rows) if bias else None
        part = self.weight(name, rows, columns, slice(None), kept_columns)
        return Projection(part, vector if self.shard.rank == 0 else None)

    def mlp(
        self,
        name: str,
        hidden: int,
        width: int,
        words: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMLP:
        """Returns the MLP under `name`. words: of gate, up and down.

        If the types of its matrices differ, all become float32. But down may be of another quantised type.
        """
        gate_proj, up_proj = (self.weight(f"{name}.{word}", width, hidden) for word in words[:2])
        return self._build_gated_mlp(gate_proj, up_proj, self.weight(f"{name}.{words[2]}", hidden, width))

    def read_fused_mlp(self, name: str, hidden: int, width: int) -> GatedMLP:
        """Returns the MLP under `name` whose gate and up are the rows of one tensor (Granite)."""
        gate_proj, up_proj = (
            self.weight(f"{name}.input_linear", 2 * width, hidden, rows)
            for rows in (slice(width), slice(width, 2 * width))
        )
        return self._build_gated_mlp(gate_proj, up_proj, self.weight(f"{name}.output_linear", hidden, width))

    def _build_gated_mlp(self, gate_proj: Weight, up_proj: Weight, down_proj: Weight) -> GatedMLP:
        # One compiled call computes all three. It takes one type, or quantised ones with another for down.
        kinds = [kind_of(weight) for weight in (gate_proj, up_proj, down_proj)]
        if kinds[0] == kinds[1] and (kinds[1] == kinds[2] or all(map(is_quantized, kinds[1:]))):
            return GatedMLP(self.kernels, gate_proj, up_proj, down_proj)
        return GatedMLP(
            self.kernels,
            *unify_dtypes([dequantize_weight(weight) for weight in (gate_proj, up_proj, down_proj)]),
        )

    def mlp_with_biases(self, name: str, hidden: int, width: int) -> BiasedMLP:
        """Returns the MLP under `name`, whose projections each have a bias."""
        return BiasedMLP(
            self.kernels,
            self.projection(f"{name}.gate_proj", width, hidden, bias=True),
            self.projection(f"{name}.up_proj", width, hidden, bias=True),
            self.projection(f"{name}.down_proj", hidden, width, bias=True),
        )


def _in_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers in bf16, or the float32 `matrix` if bf16 does not hold them."""
    narrow = matrix.to(torch.bfloat16)
    return narrow if matrix.is_meta or torch.equal(narrow.float(), matrix) else matrix


@dataclass(frozen=True)
class Heads:
    """The dimensions of grouped-query attention."""

    hidden: int
    query: int
    key: int
    width: int
    bias: bool = False
    """Whether query, key and value have a bias."""
    out_bias: bool = False
    has_head_norms: bool = False
    """Whether each query head and key head is normalized."""
    epsilon: float = 1e-6
    is_interleaved: bool = False
    """Whether numbers (2i, 2i + 1) of a head are rotated as a pair, instead of (i, i + d / 2)."""
    scale: float | None = None
    """Factor of the attention scores; None: one over the root of `width`."""
    sinks: bool = False
    """Whether each query head has a score beside those of the tokens."""


def read_heads(fields: Fields, epsilon: float, has_head_norms: bool = False) -> Heads:
    """Reads the keys about attention. Raises CheckpointError if key heads do not divide query heads."""
    hidden, query = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    key = fields.maybe_integer("num_key_value_heads") or query
    if query % key:
        raise CheckpointError(
            f"config.json: num_key_value_heads: got {key}; allowed: a divisor of {query} attention heads"
        )
    width = rotary_width("head_dim", fields.maybe_integer("head_dim") or hidden // query)
    bias = fields.flag("attention_bias", False)
    return Heads(hidden, query, key, width, bias, bias, has_head_norms, epsilon)


def columns_of(heads: range, width: int) -> slice:
    """Returns the columns of these heads, of `width` numbers each, in a row of all heads."""
    return slice(heads.start * width, heads.stop * width)


def grouped_query_attention(
    loader: Loader, name: str, sizes: Heads, rope: RopeTable | None, sliding_window: int | None
) -> GroupedQueryAttention:
    """Loads q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm) under `name`, for the heads of the shard."""
    hidden, bias, heads = sizes.hidden, sizes.bias, loader.shard.heads(sizes.query)
    query_width, key_width = sizes.query * sizes.width, sizes.key * sizes.width
    query_columns = columns_of(heads, sizes.width)
    key_columns = columns_of(loader.shard.kv_heads(sizes.key), sizes.width)
    return GroupedQueryAttention(
        kernels=loader.kernels,
        rope=rope,
        head_width=sizes.width,
        query=loader.input_projection(f"{name}.q_proj", query_width, hidden, query_columns, bias),
        key=loader.input_projection(f"{name}.k_proj", key_width, hidden, key_columns, bias),
        value=loader.input_projection(f"{name}.v_proj", key_width, hidden, key_columns, bias),
        out_proj=loader.output_projection(
            f"{name}.o_proj", hidden, query_width, query_columns, sizes.out_bias
        ),
        sliding_window=sliding_window,
        query_norm=loader.exact(f"{name}.q_norm.weight", sizes.width) if sizes.has_head_norms else None,
        key_norm=loader.exact(f"{name}.k_norm.weight", sizes.width) if sizes.has_head_norms else None,
        epsilon=sizes.epsilon,
        is_interleaved=sizes.is_interleaved,
        scale=sizes.scale,
        sinks=loader.exact(f"{name}.sinks", sizes.query)[heads.start : heads.stop] if sizes.sinks else None,
    )


@dataclass(frozen=True)
class ExpertNames:
    """Tensor names of the routed experts of one layer, and their sizes."""

    prefix: str
    """Tensor names are prefix.E.gate.weight, prefix.E.up.weight and prefix.E.down.weight, with the words
    below."""
    hidden: int
    width: int
    num_experts: int
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"
    form: str = ROWS
    """How the files have an expert, as `ExpertLayout.form` says. In COLUMNS and HALF_COLUMNS the names are
    those of `core.experts.column_tensors`, and in DOWN_COLUMNS they have no ".weight"."""
    activation: Activation = SILU

    def list_tensors(self, expert: int) -> tuple[NamedShape, ...]:
        """Returns name and shape of the tensors of one expert."""
        if self.form == COLUMNS:
            return column_tensors(f"{self.prefix}.{expert}", self.hidden, self.width)
        if self.form == HALF_COLUMNS:
            return column_tensors(f"{self.prefix}.{expert}", self.hidden, self.width)[:2]
        if self.form == DOWN_COLUMNS:
            words = self.gate_name, self.up_name, self.down_name
            return tuple((f"{self.prefix}.{expert}.{word}", self.width, self.hidden) for word in words)
        matrices = tuple((f"{name}.weight", rows, columns) for name, rows, columns in self.shapes(expert))
        return (*matrices, *self.biases(expert)) if self.form == BIASED_ROWS else matrices

    def bytes_of(self, dtype: str) -> int:
        """Bytes of an expert's matrices in a type of core/weight_types.py."""
        inner, outer = split_dtype(dtype)
        return 2 * self.width * row_bytes(inner, self.hidden) + self.hidden * row_bytes(outer, self.width)

    def biases(self, expert: int) -> tuple[NamedShape, NamedShape]:
        """Returns name and shape of the biases of one expert that has some."""
        inner, last = column_tensors(f"{self.prefix}.{expert}", self.hidden, self.width)[2:]
        return inner, last

    def shapes(self, expert: int) -> tuple[tuple[str, int, int], ...]:
        """Returns name, rows and columns of gate, up and down of one expert in ROWS."""
        return (
            (f"{self.prefix}.{expert}.{self.gate_name}", self.width, self.hidden),
            (f"{self.prefix}.{expert}.{self.up_name}", self.width, self.hidden),
            (f"{self.prefix}.{expert}.{self.down_name}", self.hidden, self.width),
        )


def find_expert_matrices(checkpoint: Checkpoint, names: ExpertNames) -> tuple[Matrix | None, Matrix | None]:
    """Gate and down of a layer's first expert; None for one that is not quantised."""
    first, *_, last = (tensor for tensor in names.list_tensors(0) if len(tensor) == 3)
    return checkpoint.find_quantized(*first), checkpoint.find_quantized(*last)


def quantised_experts(checkpoint: Checkpoint, names: ExpertNames) -> str | None:
    """Type of a layer's first expert, as `core.weight_types.join_dtypes`; None: its gate is not quantised."""
    matrix, down_matrix = find_expert_matrices(checkpoint, names)
    if matrix is None or down_matrix is None:
        return None if matrix is None else matrix.dtype
    return join_dtypes(matrix.dtype, down_matrix.dtype)
