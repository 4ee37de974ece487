"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), in its absorbed form.

The cache stores one vector per token: the compressed latent, and the rotated key that all heads share. The
up-projections of key and value are applied to the query and to the result instead of the cache. Prefill and
decode both do so, and thus do the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projections
from moesaic.models.config import Fields
from moesaic.models.layers import Projection
from moesaic.models.loader import Loader, columns_of
from moesaic.models.rope import RopeConfig, RopeTable, mscale, rotary_width
from moesaic.models.spec import KVLayout

NORM_EPSILON = 1e-6
"""Epsilon of the norms inside the attention. The other norms use the epsilon of config.json."""


@dataclass(frozen=True)
class LatentSizes:
    """The dimensions of latent attention."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the compressed query. None means that queries are not compressed."""
    kv_rank: int
    """Width of the latent from which keys and values are computed."""
    nope_width: int
    """Width of the part of a query head that is not rotated."""
    rope_width: int
    """Width of the part of a query head that is rotated."""
    value: int
    """Width of a value head."""
    bias: bool
    scale: float
    """Factor of the attention scores, including mscale."""
    is_interleaved: bool = True
    """Whether numbers (2i, 2i + 1) of the rotated part are a pair, instead of (i, i + rope_width / 2)."""

    @property
    def kv(self) -> KVLayout:
        return KVLayout(1, self.kv_rank + self.rope_width, self.kv_rank, value_in_key=True)

    @property
    def rotated_width(self) -> int:
        return self.rope_width

    def load(self, loader: Loader, name: str, rope: RopeTable, window: int | None) -> LatentAttention:
        return latent_attention(loader, name, self, rope)


def read_sizes(fields: Fields, rope: RopeConfig, is_interleaved: bool = True) -> LatentSizes:
    """Reads the keys about attention."""
    nope_width = fields.integer("qk_nope_head_dim")
    rope_width = rotary_width("qk_rope_head_dim", fields.integer("qk_rope_head_dim"))
    stretch = mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return LatentSizes(
        hidden=fields.integer("hidden_size"),
        heads=fields.integer("num_attention_heads"),
        query_rank=fields.maybe_integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_width=nope_width,
        rope_width=rope_width,
        value=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", False),
        scale=(nope_width + rope_width) ** -0.5 * stretch * stretch,
        is_interleaved=is_interleaved,
    )


@dataclass(frozen=True)
class LatentAttention:
    """The attention of one layer."""

    kernels: Kernels
    rope: RopeTable
    sizes: LatentSizes
    query_down: Projection | None
    query_norm: torch.Tensor | None
    """[query_rank]"""
    query: Projection
    """[H * (nope_width + rope_width), h or query_rank]"""
    latent: Projection
    """[kv_rank + rope_width, h]"""
    latent_norm: torch.Tensor
    """[kv_rank]"""
    key_up: torch.Tensor
    """[H, nope_width, kv_rank]"""
    value_up: torch.Tensor
    """[H, kv_rank, value]"""
    out_proj: Projection
    """[h, H * value]"""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h], positions [n] -> query [n, H, w] and key [n, 1, w], w = kv_rank + rope_width."""
        plain, rotary = self._query(rows).tensor_split([self.sizes.nope_width], dim=-1)
        rotary = self._rotate(rotary, positions)
        query = self.kernels.join(self.kernels.head_linear(plain, self.key_up), rotary)
        joint = self.kernels.linear(rows, self.latent.weight, self.latent.bias)
        latent, shared_key = joint.tensor_split([self.sizes.kv_rank], dim=-1)
        latent = self.kernels.rms_norm(latent, self.latent_norm, NORM_EPSILON)
        shared_key = self._rotate(shared_key[:, None], positions)
        return Projections(query, self.kernels.join(latent[:, None], shared_key), None)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates heads [n, H, rope_width]."""
        table, pairs = self.rope, self.sizes.is_interleaved
        return self.kernels.rope(heads, table.cosine, table.sine, positions, is_interleaved=pairs)

    def _query(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, H, nope_width + rope_width]."""
        if self.query_down is not None and self.query_norm is not None:
            rows = self.kernels.linear(rows, self.query_down.weight, self.query_down.bias)
            rows = self.kernels.rms_norm(rows, self.query_norm, NORM_EPSILON)
        heads = self.kernels.linear(rows, self.query.weight, self.query.bias)
        return heads.view(-1, len(self.key_up), self.sizes.nope_width + self.sizes.rope_width)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """query [n, H, kv_rank + rope_width] over the paged latents -> [n, H * value]."""
        latent = self.kernels.paged_attention(
            query, keys, None, batch, self.sizes.scale, value_width=self.sizes.kv_rank
        )
        return self.kernels.head_linear(latent, self.value_up).flatten(1)

    def output(self, attention_output: torch.Tensor) -> torch.Tensor:
        """[n, H * value] -> [n, h]."""
        return self.kernels.linear(attention_output, self.out_proj.weight, self.out_proj.bias)

    def with_attention_kernels(self, kernels: Kernels) -> LatentAttention:
        """Returns the same attention, whose `attend` runs on a CPU with these kernels.

        This includes the up-projection of values.
        """
        value_proj = self.value_up.transpose(1, 2)
        # Types that the CPU's kernels do not read become float32 once, here, and not at each use.
        dtype = value_proj.dtype if value_proj.dtype in kernels.unconverted_dtypes else torch.float32
        return replace(
            self, kernels=kernels, value_up=value_proj.to("cpu", dtype).contiguous().transpose(1, 2)
        )


def latent_attention(loader: Loader, name: str, sizes: LatentSizes, rope: RopeTable) -> LatentAttention:
    """Loads the tensors under `name`: the heads of the loader's shard, and the latent of all heads."""
    heads, width, lifted_width = (
        sizes.heads,
        sizes.nope_width + sizes.rope_width,
        sizes.nope_width + sizes.value,
    )
    rank, query_width, local = sizes.query_rank, heads * width, loader.shard.heads(heads)
    query_columns, value_columns = columns_of(local, width), columns_of(local, sizes.value)
    if rank is None:
        query_down, query_norm = None, None
        query = loader.input_projection(f"{name}.q_proj", query_width, sizes.hidden, query_columns)
    else:
        query_down = loader.projection(f"{name}.q_a_proj", rank, sizes.hidden, sizes.bias)
        query_norm = loader.exact(f"{name}.q_a_layernorm.weight", rank)
        query = loader.input_projection(f"{name}.q_b_proj", query_width, rank, query_columns)
    kv_up = loader.matrix(
        f"{name}.kv_b_proj", heads * lifted_width, sizes.kv_rank, columns_of(local, lifted_width)
    )
    key_up, value_up = kv_up.view(len(local), -1, sizes.kv_rank).tensor_split([sizes.nope_width], dim=1)
    return LatentAttention(
        kernels=loader.kernels,
        rope=rope,
        sizes=replace(sizes, heads=len(local)),
        query_down=query_down,
        query_norm=query_norm,
        query=query,
        latent=loader.projection(
            f"{name}.kv_a_proj_with_mqa", sizes.kv_rank + sizes.rope_width, sizes.hidden, sizes.bias
        ),
        latent_norm=loader.exact(f"{name}.kv_a_layernorm.weight", sizes.kv_rank),
        key_up=key_up,
        value_up=value_up.transpose(1, 2),
        out_proj=loader.output_projection(
            f"{name}.o_proj", sizes.hidden, heads * sizes.value, value_columns, sizes.bias
        ),
    )
