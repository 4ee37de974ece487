"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), in its absorbed form.

The cache holds one vector a token: the compressed latent and the rotated key that all heads share. The
up-projections of key and value are applied to the query and to the result instead of to the cache, in
prefill and decode alike, so both do the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projected
from moesaic.models.layers import Projection
from moesaic.models.loader import Loader, columns_of
from moesaic.models.rope import RopeTable

NORM_EPSILON = 1e-6
"""Of the norms inside the attention; config.json's own epsilon is for the others."""


@dataclass(frozen=True)
class LatentSizes:
    """The widths of latent attention."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the query's own compression; None: there is none."""
    rank: int
    """Width of the latent of key and value."""
    plain: int
    """Numbers of a query head that are not rotated."""
    turned: int
    """Numbers of a query head that are."""
    value: int
    """Numbers of a value head."""
    bias: bool
    scale: float
    """Multiplies the scores, mscale among it."""


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
    """[H * (plain + turned), h or query_rank]"""
    latent: Projection
    """[rank + turned, h]"""
    latent_norm: torch.Tensor
    """[rank]"""
    key_up: torch.Tensor
    """[H, plain, rank]"""
    value_up: torch.Tensor
    """[H, rank, value]"""
    out: Projection
    """[h, H * value]"""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projected:
        """rows [n, h], positions [n] -> query [n, H, rank + turned] and key [n, 1, rank + turned]."""
        plain, turned = self._query(rows).tensor_split([self.sizes.plain], dim=-1)
        turned = self._turn(turned, positions)
        query = self.kernels.join(self.kernels.head_linear(plain, self.key_up), turned)
        both = self.kernels.linear(rows, self.latent.weight, self.latent.bias)
        latent, shared = both.tensor_split([self.sizes.rank], dim=-1)
        latent = self.kernels.rms_norm(latent, self.latent_norm, NORM_EPSILON)
        shared = self._turn(shared[:, None], positions)
        return Projected(query, self.kernels.join(latent[:, None], shared), None)

    def _turn(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, H, turned], rotated."""
        return self.kernels.rope(heads, self.rope.cosine, self.rope.sine, positions, interleaved=True)

    def _query(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, H, plain + turned]."""
        if self.query_down is not None and self.query_norm is not None:
            rows = self.kernels.linear(rows, self.query_down.weight, self.query_down.bias)
            rows = self.kernels.rms_norm(rows, self.query_norm, NORM_EPSILON)
        heads = self.kernels.linear(rows, self.query.weight, self.query.bias)
        return heads.view(-1, len(self.key_up), self.sizes.plain + self.sizes.turned)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """[n, H, rank + turned] over the paged latents: [n, H * value]."""
        latent = self.kernels.paged_attention(
            query, keys, None, batch, self.sizes.scale, value_width=self.sizes.rank
        )
        return self.kernels.head_linear(latent, self.value_up).flatten(1)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[n, H * value] -> [n, h]."""
        return self.kernels.linear(attended, self.out.weight, self.out.bias)

    def beside(self, kernels: Kernels) -> LatentAttention:
        """The same, of which `attend` computes on a CPU with these kernels, the lift of values too."""
        lifted = self.value_up.transpose(1, 2)
        dtype = lifted.dtype if lifted.dtype in kernels.stored else torch.float32
        return replace(self, kernels=kernels, value_up=lifted.to("cpu", dtype).contiguous().transpose(1, 2))


def latent_attention(loader: Loader, name: str, sizes: LatentSizes, rope: RopeTable) -> LatentAttention:
    """The tensors under `name`: the heads of the loader's shard, and the latent that all heads share."""
    heads, width, lifted = sizes.heads, sizes.plain + sizes.turned, sizes.plain + sizes.value
    rank, both, local = sizes.query_rank, heads * width, loader.shard.heads(heads)
    asking, answering = columns_of(local, width), columns_of(local, sizes.value)
    if rank is None:
        down, norm = None, None
        query = loader.input_projection(f"{name}.q_proj", both, sizes.hidden, asking)
    else:
        down = loader.projection(f"{name}.q_a_proj", rank, sizes.hidden, sizes.bias)
        norm = loader.exact(f"{name}.q_a_layernorm.weight", rank)
        query = loader.input_projection(f"{name}.q_b_proj", both, rank, asking)
    up = loader.matrix(f"{name}.kv_b_proj", heads * lifted, sizes.rank, columns_of(local, lifted))
    key_up, value_up = up.view(len(local), -1, sizes.rank).tensor_split([sizes.plain], dim=1)
    return LatentAttention(
        kernels=loader.kernels,
        rope=rope,
        sizes=replace(sizes, heads=len(local)),
        query_down=down,
        query_norm=norm,
        query=query,
        latent=loader.projection(
            f"{name}.kv_a_proj_with_mqa", sizes.rank + sizes.turned, sizes.hidden, sizes.bias
        ),
        latent_norm=loader.exact(f"{name}.kv_a_layernorm.weight", sizes.rank),
        key_up=key_up,
        value_up=value_up.transpose(1, 2),
        out=loader.output_projection(
            f"{name}.o_proj", sizes.hidden, heads * sizes.value, answering, sizes.bias
        ),
    )
