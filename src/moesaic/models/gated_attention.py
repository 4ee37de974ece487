"""Grouped-query attention whose result is multiplied by the sigmoid of a gate (Qwen3-Next).

q_proj gives each head its query and, after it, its gate. The gate travels behind the query, so that attention
can run elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.models.block import Projections
from moesaic.models.layers import GroupedQueryAttention
from moesaic.models.loader import Heads, Loader, columns_of
from moesaic.models.rope import RopeTable


@dataclass(frozen=True)
class GatedAttention(GroupedQueryAttention):
    """`query` has 2 * head_width rows for each head: its query and its gate."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h], positions [n] -> query: rotated queries and their gates [n, Hq, 2 * d]; key and value
        [n, Hkv, d]."""
        parts, width = (self.query, self.key, self.value), self.head_width
        joint, key, value = self.kernels.linears(rows, [p.weight for p in parts], [p.bias for p in parts])
        del rows  # free megabytes of memory if there are many rows
        heads = joint.view(-1, joint.shape[1] // (2 * width), 2 * width)
        query = self._rotate_heads(heads[..., :width], positions, self.query_norm)
        return Projections(
            query=self.kernels.join(query, heads[..., width:]),
            key=self._rotate(key, positions, self.key_norm),
            value=value.view(-1, value.shape[1] // width, width),
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """query [n, Hq, 2 * d] over the paged cache -> [n, Hq * d]."""
        width = self.head_width
        half = width // 2  # joined again, the queries are dense
        dense = self.kernels.join(query[..., :half], query[..., half:width])
        attention_output = super().attend(dense, keys, values, batch)
        return self.kernels.sigmoid_times(
            attention_output.view(-1, query.shape[1], width), query[..., width:]
        )


def gated_attention(loader: Loader, name: str, sizes: Heads, rope: RopeTable) -> GatedAttention:
    """Loads q_proj, k_proj, v_proj, o_proj, q_norm and k_norm under `name`, for the heads of the shard.

    One is added to the weights of the norms.
    """
    hidden, width, bias, heads = sizes.hidden, sizes.width, sizes.bias, loader.shard.heads(sizes.query)
    key_width, key_columns = sizes.key * width, columns_of(loader.shard.kv_heads(sizes.key), width)
    joint, columns = columns_of(heads, 2 * width), columns_of(heads, width)
    return GatedAttention(
        kernels=loader.kernels,
        rope=rope,
        head_width=width,
        query=loader.input_projection(f"{name}.q_proj", 2 * sizes.query * width, hidden, joint, bias),
        key=loader.input_projection(f"{name}.k_proj", key_width, hidden, key_columns, bias),
        value=loader.input_projection(f"{name}.v_proj", key_width, hidden, key_columns, bias),
        out_proj=loader.output_projection(f"{name}.o_proj", hidden, sizes.query * width, columns, bias),
        query_norm=1.0 + loader.exact(f"{name}.q_norm.weight", width),
        key_norm=1.0 + loader.exact(f"{name}.k_norm.weight", width),
        epsilon=sizes.epsilon,
    )
