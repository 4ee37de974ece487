"""From checkpoint names to the parts of a model: what several model files share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from moesaic.core.errors import CheckpointError
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import Fields
from moesaic.models.layers import GatedMLP, GroupedQueryAttention, Projection
from moesaic.models.rope import RopeTable, turned_width
from moesaic.models.shard import WHOLE, Shard


@dataclass(frozen=True)
class Loader:
    """Reads tensors of a checkpoint to one device."""

    checkpoint: Checkpoint
    kernels: Kernels
    device: str
    dtype: torch.dtype
    """Of matrices; vectors and gates are always float32."""
    shard: Shard = WHOLE
    """Whose heads are read."""
    of_expert: Shard = WHOLE
    """Whose part of the width of every routed expert is read."""

    def matrix(self, name: str, rows: int, columns: int, *part: slice) -> torch.Tensor:
        """`name`.weight [rows, columns], or a part of it."""
        return self.checkpoint.tensor(
            f"{name}.weight", rows, columns, dtype=self.dtype, device=self.device, part=part
        )

    def expert_dtype(self, names: ExpertNames) -> torch.dtype:
        """Of routed experts: uint8 where they are compressed and the kernels compute from that."""
        stays = self.of_expert.size == 1 and self.kernels.compressed and self.dtype is torch.bfloat16
        first = f"{names.shapes(0)[0][0]}.weight"
        return torch.uint8 if stays and self.checkpoint.dtype(first) is torch.uint8 else self.dtype

    def exact(self, name: str, *shape: int) -> torch.Tensor:
        """`name`, a full tensor name, in float32."""
        return self.checkpoint.tensor(name, *shape, dtype=torch.float32, device=self.device)

    def projection(self, name: str, rows: int, columns: int, bias: bool = False) -> Projection:
        """`name`.weight, with `name`.bias when the config says so."""
        return self.input_projection(name, rows, columns, slice(None), bias)

    def input_projection(
        self, name: str, rows: int, columns: int, kept: slice, bias: bool = False
    ) -> Projection:
        """The `kept` rows of `name`.weight [rows, columns] and of `name`.bias: what leads to some heads."""
        vector = self.exact(f"{name}.bias", rows)[kept] if bias else None
        return Projection(self.matrix(name, rows, columns, kept), vector)

    def output_projection(
        self, name: str, rows: int, columns: int, kept: slice, bias: bool = False
    ) -> Projection:
        """The `kept` columns of `name`.weight [rows, columns]: what leads from some heads.

        Its results of all ranks add up to the whole one's; the bias is rank 0's, so that it counts once.
        """
        vector = self.exact(f"{name}.bias", rows) if bias else None
        part = self.matrix(name, rows, columns, slice(None), kept)
        return Projection(part, vector if self.shard.rank == 0 else None)

    def mlp(self, name: str, hidden: int, width: int) -> GatedMLP:
        """gate_proj, up_proj and down_proj under `name`."""
        return GatedMLP(
            kernels=self.kernels,
            gate=self.matrix(f"{name}.gate_proj", width, hidden),
            up=self.matrix(f"{name}.up_proj", width, hidden),
            down=self.matrix(f"{name}.down_proj", hidden, width),
        )


@dataclass(frozen=True)
class Heads:
    """The sizes of grouped-query attention."""

    hidden: int
    query: int
    key: int
    width: int
    bias: bool = False
    normed: bool = False
    """Norms on each query and key head."""
    epsilon: float = 1e-6


def read_heads(fields: Fields, epsilon: float, normed: bool = False) -> Heads:
    """The keys about attention. Raises CheckpointError when key heads don't divide query heads."""
    hidden, query = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    key = fields.maybe_integer("num_key_value_heads") or query
    if query % key:
        raise CheckpointError(
            f"config.json: num_key_value_heads: got {key}; allowed: a divisor of {query} attention heads"
        )
    width = turned_width("head_dim", fields.maybe_integer("head_dim") or hidden // query)
    return Heads(hidden, query, key, width, fields.flag("attention_bias", False), normed, epsilon)


def columns_of(heads: range, width: int) -> slice:
    """Where these heads of `width` numbers each lie in a row of all heads."""
    return slice(heads.start * width, heads.stop * width)


def grouped_query_attention(
    loader: Loader, name: str, sizes: Heads, rope: RopeTable, sliding_window: int | None
) -> GroupedQueryAttention:
    """q_proj, k_proj, v_proj and o_proj (and q_norm, k_norm) under `name`, of the heads of the shard."""
    hidden, bias = sizes.hidden, sizes.bias
    wide, narrow = sizes.query * sizes.width, sizes.key * sizes.width
    asking = columns_of(loader.shard.heads(sizes.query), sizes.width)
    asked = columns_of(loader.shard.kv_heads(sizes.key), sizes.width)
    return GroupedQueryAttention(
        kernels=loader.kernels,
        rope=rope,
        head_width=sizes.width,
        query=loader.input_projection(f"{name}.q_proj", wide, hidden, asking, bias),
        key=loader.input_projection(f"{name}.k_proj", narrow, hidden, asked, bias),
        value=loader.input_projection(f"{name}.v_proj", narrow, hidden, asked, bias),
        out=loader.output_projection(f"{name}.o_proj", hidden, wide, asking, bias),
        sliding_window=sliding_window,
        query_norm=loader.exact(f"{name}.q_norm.weight", sizes.width) if sizes.normed else None,
        key_norm=loader.exact(f"{name}.k_norm.weight", sizes.width) if sizes.normed else None,
        epsilon=sizes.epsilon,
    )


@dataclass(frozen=True)
class ExpertNames:
    """How a model spells the routed experts of one layer, and their sizes."""

    prefix: str
    """Followed by .E.gate.weight, with the three words below."""
    hidden: int
    width: int
    num_experts: int
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def shapes(self, expert: int) -> tuple[tuple[str, int, int], ...]:
        """Name and shape of gate, up and down of one expert."""
        return (
            (f"{self.prefix}.{expert}.{self.gate}", self.width, self.hidden),
            (f"{self.prefix}.{expert}.{self.up}", self.width, self.hidden),
            (f"{self.prefix}.{expert}.{self.down}", self.hidden, self.width),
        )


def claim_experts(checkpoint: Checkpoint, names: ExpertNames) -> None:
    """Checks that every expert is there in its shape, reading none."""
    for expert in range(names.num_experts):
        for name, rows, columns in names.shapes(expert):
            checkpoint.claim(f"{name}.weight", rows, columns)


def experts(loader: Loader, names: ExpertNames, expert_ids: Iterable[int] | None) -> ExpertWeights:
    """The experts of one layer; `expert_ids` None means all. Of each this rank's part: rows of gate and up,
    columns of down.

    Raises CheckpointError for an id out of range.
    """
    wanted = set(range(names.num_experts) if expert_ids is None else expert_ids)
    if wanted and not 0 <= min(wanted) <= max(wanted) < names.num_experts:
        raise CheckpointError(f"experts: got {sorted(wanted)}; allowed: 0 to {names.num_experts - 1}")
    loader = replace(loader, dtype=loader.expert_dtype(names))
    parts: Sequence[tuple[slice, ...]] = ((), (), ())
    if loader.of_expert.size > 1:
        kept = loader.of_expert.part(names.width)
        parts = (kept,), (kept,), (slice(None), kept)
    columns: tuple[list[torch.Tensor | None], ...] = ([], [], [])
    for expert in range(names.num_experts):
        for column, shape, part in zip(columns, names.shapes(expert), parts, strict=True):
            column.append(loader.matrix(*shape, *part) if expert in wanted else None)
    return ExpertWeights(*map(tuple, columns))
