"""Building blocks of the models: grouped-query attention, the top-k gate, the dense MLP.

Head counts are derived from the shapes of the weights, so a rank's heads are just smaller weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.matrix import Weight
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projections
from moesaic.models.rope import RopeTable


@dataclass(frozen=True)
class Projection:
    """A linear map with an optional bias."""

    weight: Weight
    """[o, i]"""
    bias: torch.Tensor | None = None
    """[o] float32"""


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose key heads are each shared by several query heads (Ainslie et al. 2023)."""

    kernels: Kernels
    rope: RopeTable | None
    """None: nothing is rotated."""
    head_width: int
    query: Projection
    key: Projection
    value: Projection
    out_proj: Projection
    sliding_window: int | None = None
    query_norm: torch.Tensor | None = None
    """[head_width] norm of each query head before its rotation (Qwen3)."""
    key_norm: torch.Tensor | None = None
    epsilon: float = 1e-6
    is_interleaved: bool = False
    """Whether numbers (2i, 2i + 1) of a head are rotated as a pair, instead of (i, i + d / 2)."""
    scale: float | None = None
    """Factor of the attention scores; None: one over the root of head_width."""
    sinks: torch.Tensor | None = None
    """[Hq] float32, a score beside those of the tokens (gpt-oss). None: there is none."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h], positions [n] -> rotated query and key, and the value, of each head."""
        parts = (self.query, self.key, self.value)
        query, key, value = self.kernels.linears(rows, [p.weight for p in parts], [p.bias for p in parts])
        del rows  # free megabytes of memory if there are many rows
        return Projections(
            query=self._rotate(query, positions, self.query_norm),
            key=self._rotate(key, positions, self.key_norm),
            value=value.view(-1, value.shape[1] // self.head_width, self.head_width),
        )

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """[n, H * d] -> heads [n, H, d], normalized and rotated."""
        heads = rows.view(-1, rows.shape[1] // self.head_width, self.head_width)
        return self._rotate_heads(heads, positions, norm)

    def _rotate_heads(
        self, heads: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """heads [n, H, d] -> the same, normalized and rotated."""
        if self.rope is None:
            return heads if norm is None else self.kernels.rms_norm(heads, norm, self.epsilon)
        return self.kernels.rope(
            heads,
            self.rope.cosine,
            self.rope.sine,
            positions,
            is_interleaved=self.is_interleaved,
            norm=norm,
            epsilon=self.epsilon,
        )

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """query [n, Hq, d] over the paged cache -> [n, Hq * d]."""
        scale = self.head_width**-0.5 if self.scale is None else self.scale
        window = self.sliding_window
        attention = self.kernels.paged_attention
        return attention(query, keys, values, batch, scale, window, sinks=self.sinks).flatten(1)

    def output(self, attention_output: torch.Tensor) -> torch.Tensor:
        """[n, Hq * d] -> [n, h]."""
        return self.kernels.linear(attention_output, self.out_proj.weight, self.out_proj.bias)

    def with_attention_kernels(self, kernels: Kernels) -> GroupedQueryAttention:
        """The same attention, whose `attend` runs on a CPU with these kernels. It reads only sinks."""
        return replace(self, kernels=kernels, sinks=None if self.sinks is None else self.sinks.cpu())


@dataclass(frozen=True)
class Scale:
    """Multiplies rows by a number (Granite).

    The kernels have no such operation. So it is a rotation of all pairs of numbers by no angle, whose cosine
    is the number.
    """

    kernels: Kernels
    cosine: torch.Tensor
    """[1, 1] float32: the number."""
    sine: torch.Tensor
    """[1, 1] float32: zero."""
    position: torch.Tensor
    """[1] int64: zero."""

    @classmethod
    def build(cls, kernels: Kernels, factor: float, device: str) -> Scale:
        number = torch.tensor([[factor]], dtype=torch.float32, device=device)
        return cls(
            kernels, number, torch.zeros_like(number), torch.zeros(1, dtype=torch.int64, device=device)
        )

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, w] -> [n, w]. w is even."""
        pairs = rows.view(1, rows.numel() // 2, 2)
        return self.kernels.rope(pairs, self.cosine, self.sine, self.position).view(rows.shape)


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
    gate_proj: Weight
    """[w, h]"""
    up_proj: Weight
    """[w, h]"""
    down_proj: Weight
    """[h, w]"""

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h]."""
        return self.kernels.gated_mlp(rows, self.gate_proj, self.up_proj, self.down_proj)


@dataclass(frozen=True)
class BiasedMLP:
    """A GatedMLP whose three projections each add a bias (ERNIE 4.5 with use_bias)."""

    kernels: Kernels
    gate_proj: Projection
    up_proj: Projection
    down_proj: Projection

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h]."""
        parts = (self.gate_proj, self.up_proj)
        gate, up = self.kernels.linears(rows, [p.weight for p in parts], [p.bias for p in parts])
        heads = gate.unsqueeze(1)
        wide = self.kernels.times(self.kernels.sigmoid_times(heads, heads), up)
        return self.kernels.linear(wide, self.down_proj.weight, self.down_proj.bias)


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
