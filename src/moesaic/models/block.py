"""A decoder block in stages, so that communication and offloading can happen between the stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import LayerStates
from moesaic.kernels.table import Kernels


@dataclass(frozen=True)
class Projections:
    """Query, key and value of the step's rows."""

    query: torch.Tensor
    """[n, Hq, dk] float32."""
    key: torch.Tensor
    """[n, Hkv, dk] float32, for the KV cache."""
    value: torch.Tensor | None
    """[n, Hkv, dv] float32. None if the value is part of the key (latent attention)."""


@dataclass(frozen=True)
class GateOutput:
    """The rows between attention and feed-forward."""

    residual: torch.Tensor
    """[n, h] float32."""
    normed_rows: torch.Tensor
    """[n, h] float32: input of the experts and of the dense MLP."""
    expert_ids: torch.Tensor | None
    """[n, k] int64 logical expert ids, best first; None in a dense layer."""
    weights: torch.Tensor | None
    """[n, k] float32, applied once, in `merge`. These are ones if the weights were applied earlier: by the
    servers with --combine partial, or by GroupExperts.share with --moe-collectives all-reduce."""

    def first(self, count: int) -> GateOutput:
        """The first rows."""
        ids = None if self.expert_ids is None else self.expert_ids[:count]
        weights = None if self.weights is None else self.weights[:count]
        return GateOutput(self.residual[:count], self.normed_rows[:count], ids, weights)


class Attention(Protocol):
    """The attention of one layer: grouped-query or latent attention."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections: ...

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor: ...

    def output(self, attention_output: torch.Tensor) -> torch.Tensor: ...

    def with_attention_kernels(self, kernels: Kernels) -> Attention:
        """Returns the same attention, whose `attend` runs on a CPU with these kernels."""
        ...


class Recurrence(Protocol):
    """The linear attention or short convolution of one layer, which keeps a state of each sequence."""

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """Query, key and value are what `recur` needs of each row."""
        ...

    def recur(self, rows: Projections, states: LayerStates, batch: AttentionBatch) -> torch.Tensor:
        """Rows from `project` -> [n, Hv * dv]. Changes the states of the batch's sequences."""
        ...

    def output(self, attention_output: torch.Tensor) -> torch.Tensor: ...

    def with_attention_kernels(self, kernels: Kernels) -> Recurrence:
        """Returns the same attention, whose `recur` runs on a CPU with these kernels."""
        ...


class Router(Protocol):
    """Chooses experts: rows [n, h] -> (ids [n, k] int64, weights [n, k] float32)."""

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class Dense(Protocol):
    """The part of the feed-forward that applies to every row: rows [n, h] -> [n, h]."""

    def apply(self, rows: torch.Tensor) -> torch.Tensor: ...


class Block(Protocol):
    """A layer of the model. The runtime calls its stages in the order in which they stand here."""

    @property
    def is_routed(self) -> bool:
        """Whether the layer has routed experts."""
        ...

    def pre_attention(self, hidden: torch.Tensor, positions: torch.Tensor) -> Projections: ...

    def attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor: ...

    def recurrence(self, rows: Projections, states: LayerStates, batch: AttentionBatch) -> torch.Tensor:
        """`attention` of a layer that keeps states."""
        ...

    def output_projection(self, attention_output: torch.Tensor) -> torch.Tensor: ...

    def with_attention_kernels(self, kernels: Kernels) -> Block:
        """Returns the same block, whose `attention` runs on a CPU with these kernels."""
        ...

    def gate(self, hidden: torch.Tensor, partial: torch.Tensor) -> GateOutput: ...

    def guess_experts(self, hidden: torch.Tensor) -> torch.Tensor | None: ...

    def dense(self, normed_rows: torch.Tensor) -> torch.Tensor | None: ...

    def merge(
        self, gate_output: GateOutput, dense: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class DecoderBlock:
    """Norm, attention, norm, feed-forward: the block of all models here."""

    kernels: Kernels
    epsilon: float
    input_norm: torch.Tensor
    """[h]"""
    attention_part: Attention | Recurrence
    post_norm: torch.Tensor
    """[h]"""
    router: Router | None
    dense_part: Dense | None

    @property
    def is_routed(self) -> bool:
        return self.router is not None

    def pre_attention(self, hidden: torch.Tensor, positions: torch.Tensor) -> Projections:
        """hidden [n, h] and positions [n] -> query, key and value of each row."""
        return self.attention_part.project(
            self.kernels.rms_norm(hidden, self.input_norm, self.epsilon), positions
        )

    def attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Attends with query [n, Hq, dk] over one layer's paged cache. Returns [n, Hq * dv].

        keys [blocks, block_size, Hkv, dk] and values [blocks, block_size, Hkv, dv] already contain this
        step's rows.
        """
        # A layer has attention or a recurrence. `ModelSpec.state_layers` says which, and callers go by it.
        return cast(Attention, self.attention_part).attend(query, keys, values, batch)

    def recurrence(self, rows: Projections, states: LayerStates, batch: AttentionBatch) -> torch.Tensor:
        """Linear attention of the rows over the states of one layer. Returns [n, Hv * dv]."""
        return cast(Recurrence, self.attention_part).recur(rows, states, batch)

    def output_projection(self, attention_output: torch.Tensor) -> torch.Tensor:
        """[n, Hq * dv] -> [n, h]. The result is a partial sum if heads are split over ranks."""
        return self.attention_part.output(attention_output)

    def with_attention_kernels(self, kernels: Kernels) -> DecoderBlock:
        """Returns the same block, whose `attention` runs on a CPU with these kernels."""
        return replace(self, attention_part=self.attention_part.with_attention_kernels(kernels))

    def gate(self, hidden: torch.Tensor, partial: torch.Tensor) -> GateOutput:
        """Adds the attention output [n, h] to hidden [n, h], normalizes, and chooses experts."""
        residual, normed_rows = self.kernels.add_norm(hidden, partial, self.post_norm, self.epsilon)
        if self.router is None:
            return GateOutput(residual, normed_rows, None, None)
        return GateOutput(residual, normed_rows, *self.router.choose(normed_rows))

    def guess_experts(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The experts [n, k] that this layer's gate chooses if earlier hidden states [n, h] come to it. None
        in a dense layer."""
        return None if self.router is None else self.router.choose(self._normalize(hidden))[0]

    def _normalize(self, residual: torch.Tensor) -> torch.Tensor:
        """[n, h] -> [n, h], as before the gate."""
        return self.kernels.rms_norm(residual, self.post_norm, self.epsilon)

    def dense(self, normed_rows: torch.Tensor) -> torch.Tensor | None:
        """Applies the shared experts or the dense MLP. Returns [n, h], or None if the layer has neither."""
        return None if self.dense_part is None else self.dense_part.apply(normed_rows)

    def merge(
        self, gate_output: GateOutput, dense: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns residual + dense + sum of weights * rows [n, k, h], added in top-k order."""
        return self.kernels.merge(gate_output.residual, dense, rows, gate_output.weights)
