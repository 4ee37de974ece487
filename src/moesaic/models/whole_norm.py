"""Grouped-query attention that normalizes all query heads of a row together, and all key heads (OLMoE).

The norm comes before the rows are split into heads, so its root mean square is that of the whole width. A
rank of a tensor-parallel group therefore computes the queries and keys of all heads, normalizes them, and
keeps those of its own heads. It needs no exchange, and a head has the same bits as in one process. In
exchange each rank reads q_proj and k_proj whole: with n ranks, n times their flops and bytes. v_proj and
o_proj are split as everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.models.block import Projections
from moesaic.models.layers import GroupedQueryAttention
from moesaic.models.loader import Heads, Loader, columns_of
from moesaic.models.rope import RopeTable


@dataclass(frozen=True, kw_only=True)
class WholeNormAttention(GroupedQueryAttention):
    """`query` and `key` have the rows of all heads; `value` and `out` those of this rank's heads.

    query_norm: [Hq * head_width], and key_norm: [Hkv * head_width], with all heads of the model.
    """

    query_columns: slice
    """Columns of this rank's query heads in a row of all heads."""
    key_columns: slice
    clip: float | None
    """Greatest absolute value of a query, key or value before the rotation. None: no limit."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h], positions [n] -> rotated query and key, and the value, of this rank's heads."""
        parts = (self.query, self.key, self.value)
        query, key, value = self.kernels.linears(rows, [p.weight for p in parts], [p.bias for p in parts])
        del rows  # free megabytes of memory if there are many rows
        query = self._clip(self._apply_norm(query, self.query_norm))[:, self.query_columns]
        key = self._clip(self._apply_norm(key, self.key_norm))[:, self.key_columns]
        return Projections(
            query=self._rotate(query, positions, None),
            key=self._rotate(key, positions, None),
            value=self._clip(value).view(-1, value.shape[1] // self.head_width, self.head_width),
        )

    def _apply_norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rows if weight is None else self.kernels.rms_norm(rows, weight, self.epsilon)

    def _clip(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.clip is None else self.kernels.clip(rows, self.clip)


def whole_norm_attention(
    loader: Loader, name: str, sizes: Heads, rope: RopeTable, clip: float | None
) -> WholeNormAttention:
    """Loads q_proj, k_proj, v_proj, o_proj, q_norm and k_norm under `name`, for the heads of the shard."""
    hidden, bias = sizes.hidden, sizes.bias
    query_width, key_width = sizes.query * sizes.width, sizes.key * sizes.width
    query_columns = columns_of(loader.shard.heads(sizes.query), sizes.width)
    key_columns = columns_of(loader.shard.kv_heads(sizes.key), sizes.width)
    return WholeNormAttention(
        kernels=loader.kernels,
        rope=rope,
        head_width=sizes.width,
        query=loader.projection(f"{name}.q_proj", query_width, hidden, bias),
        key=loader.projection(f"{name}.k_proj", key_width, hidden, bias),
        value=loader.input_projection(f"{name}.v_proj", key_width, hidden, key_columns, bias),
        out_proj=loader.output_projection(
            f"{name}.o_proj", hidden, query_width, query_columns, sizes.out_bias
        ),
        query_norm=loader.exact(f"{name}.q_norm.weight", query_width),
        key_norm=loader.exact(f"{name}.k_norm.weight", key_width),
        epsilon=sizes.epsilon,
        query_columns=query_columns,
        key_columns=key_columns,
        clip=clip,
    )
