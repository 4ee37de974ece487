"""A loaded model: embedding, blocks, LM head and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch

from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.block import Block
from moesaic.models.layer_norm import Centring
from moesaic.models.layers import Scale
from moesaic.models.prediction import PredictionLayer
from moesaic.models.spec import ModelSpec


@dataclass(frozen=True)
class Model:
    """The weights and the math of a model in one process. The runtime calls the stages of its blocks."""

    spec: ModelSpec
    kernels: Kernels
    embedding: torch.Tensor
    """[V, h]"""
    blocks: tuple[Block, ...]
    final_norm: torch.Tensor
    """[h]"""
    head: torch.Tensor
    """[V, h]; the same tensor as the embedding if the two are tied."""
    epsilon: float
    experts: Mapping[int, ExpertWeights]
    """Layer -> routed experts in this process; empty in an attention worker."""
    scale: Scale | None = None
    """Of embeddings, before the first block (Granite)."""
    centring: Centring | None = None
    """Before the final norm, where that subtracts the mean of a row (DBRX)."""
    prediction: PredictionLayer | None = None
    """Predicts the token after the next one. None: it is not loaded."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [n] -> hidden [n, h] float32."""
        rows = self.kernels.embed(self.embedding, token_ids)
        return rows if self.scale is None else self.scale.apply(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] after the last block -> [m, V] float32."""
        hidden = hidden if self.centring is None else self.centring.apply(hidden)
        normed = self.kernels.rms_norm(hidden, self.final_norm, self.epsilon)
        return self.kernels.linear(normed, self.head)

    def expert_weights(self, layer: int) -> ExpertWeights:
        """Returns the routed experts of a layer. Raises KeyError if they are not in this process."""
        return self.experts[layer]

    @property
    def num_parameters(self) -> int:
        """Parameters in this process. Tied ones count once."""
        others = sum(tensor.numel() for tensor in self._tensors() if tensor.is_floating_point())
        return others + sum(weights.packed_numbers for weights in self.experts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of these parameters as stored in memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        routed = tuple(self.experts.values())
        parts = (self.embedding, self.blocks, self.final_norm, self.head, routed, self.prediction)
        weights = [one for one in _walk(parts) if one.is_floating_point() or one.dtype is torch.uint8]
        return list({(tensor.data_ptr(), tensor.shape): tensor for tensor in weights}.values())


def _walk(part: object) -> Iterator[torch.Tensor]:
    """Yields every weight in nested dataclasses and tuples. Rotary tables and constants are none."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _walk(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            if field.name not in ("rope", "centring"):
                yield from _walk(getattr(part, field.name))
