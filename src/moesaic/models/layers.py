"""Building blocks of the models: grouped-query attention, the top-k gate, the dense MLP.

Head counts are derived from the shapes of the weights, so a rank's heads are just smaller weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projected
from moesaic.models.rope import RopeTable


@dataclass(frozen=True)
class Projection:
    """A linear map with an optional bias."""

    weight: torch.Tensor
    """[o, i]"""
    bias: torch.Tensor | None = None
    """[o] float32"""


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose key heads are each shared by several query heads (Ainslie et al. 2023)."""

    kernels: Kernels
    rope: RopeTable
    head_width: int
    query: Projection
    key: Projection
    value: Projection
    out: Projection
    sliding_window: int | None = None
    query_norm: torch.Tensor | None = None
    """[head_width] norm of each query head before its rotation (Qwen3)."""
    key_norm: torch.Tensor | None = None
    epsilon: float = 1e-6
    sinks: torch.Tensor | None = None
    """[Hq] float32, a score beside those of the tokens (gpt-oss). None: there is none."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projected:
        """rows [n, h], positions [n] -> rotated query and key, and the value, of each head."""
        parts = (self.query, self.key, self.value)
        query, key, value = self.kernels.linears(rows, [p.weight for p in parts], [p.bias for p in parts])
        del rows  # free megabytes of memory if there are many rows
        return Projected(
            query=self._rotate(query, positions, self.query_norm),
            key=self._rotate(key, positions, self.key_norm),
            value=value.view(-1, value.shape[1] // self.head_width, self.head_width),
        )

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """[n, H * d] -> heads [n, H, d], normalized and rotated."""
        heads = rows.view(-1, rows.shape[1] // self.head_width, self.head_width)
        table = self.rope
        return self.kernels.rope(heads, table.cosine, table.sine, positions, norm=norm, epsilon=self.epsilon)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """query [n, Hq, d] over the paged cache -> [n, Hq * d]."""
        scale = self.head_width**-0.5
        window = self.sliding_window
        attention = self.kernels.paged_attention
        return attention(query, keys, values, batch, scale, window, sinks=self.sinks).flatten(1)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[n, Hq * d] -> [n, h]."""
        return self.kernels.linear(attended, self.out.weight, self.out.bias)

    def with_attention_kernels(self, kernels: Kernels) -> GroupedQueryAttention:
        """The same attention, whose `attend` runs on a CPU with these kernels. It reads no weights."""
        return replace(self, kernels=kernels)


@dataclass(frozen=True)
class TopKRouter:
    """Scores all experts, then takes the k experts with the highest score, as `gating` says."""

    kernels: Kernels
    weight: torch.Tensor
    """[E, h] float32"""
    gating: Gating
    bias: torch.Tensor | None = None
    """[E] float32, added to the scores that choose; None: nothing is added."""

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [n, h] -> expert ids [n, k] int64, best first, and weights [n, k] float32."""
        return self.kernels.gate(rows, self.weight, self.gating, self.bias)


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate) * up): the dense feed-forward, and the shared experts as one wide MLP."""

    kernels: Kernels
    gate: torch.Tensor
    """[w, h]"""
    up: torch.Tensor
    """[w, h]"""
    down: torch.Tensor
    """[h, w]"""

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h]."""
        return self.kernels.gated_mlp(rows, self.gate, self.up, self.down)


@dataclass(frozen=True)
class GatedSharedExpert:
    """A shared expert whose result is multiplied by sigmoid(gate row): a number for each row (Qwen2-MoE)."""

    kernels: Kernels
    expert: GatedMLP
    gate: torch.Tensor
    """[1, h] float32"""

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h]."""
        return self.kernels.sigmoid_gate(rows, self.gate, self.expert.apply(rows))
