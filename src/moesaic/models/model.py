"""A loaded model: embedding, blocks, LM head and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch

from moesaic.kernels.matrix import QuantizedMatrix, Weight, number_dtype
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
    embedding: Weight
    """[V, h]"""
    blocks: tuple[Block, ...]
    final_norm: torch.Tensor
    """[h]"""
    head: Weight
    """[V, h]; the same tensor as the embedding if the two are tied."""
    epsilon: float
    experts: Mapping[int, ExpertWeights]
    """Layer -> routed experts in this process; empty in an attention worker."""
    scale: Scale | None = None
    """Multiplies embeddings before the first block (Granite). None: nothing is multiplied."""
    centring: Centring | None = None
    """Subtracts the mean of each row before the final norm (DBRX). None: the final norm does not."""
    prediction: PredictionLayer | None = None
    """Predicts the token after the next one. None: it is not loaded."""
    head_bias: torch.Tensor | None = None
    """[V] float32, added to the logits (ERNIE 4.5 with use_bias). None: nothing is added."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [n] -> hidden [n, h] float32."""
        rows = self.kernels.embed(self.embedding, token_ids)
        return rows if self.scale is None else self.scale.apply(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] after the last block -> [m, V] float32."""
        hidden = hidden if self.centring is None else self.centring.apply(hidden)
        normed_rows = self.kernels.rms_norm(hidden, self.final_norm, self.epsilon)
        return self.kernels.linear(normed_rows, self.head, self.head_bias)

    def expert_weights(self, layer: int) -> ExpertWeights:
        """Returns the routed experts of a layer. Raises KeyError if they are not in this process."""
        return self.experts[layer]

    def block(self, layer: int) -> Block:
        """The block of a layer, also of the one that predicts the token after the next one."""
        if layer < len(self.blocks):
            return self.blocks[layer]
        assert self.prediction is not None and layer == self.prediction.layer
        return self.prediction.block

    def enter_prediction(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows [n, h] before the block of the layer that predicts the token after the next one.

        hidden: [n, h] after the last block. token_ids: [n] the token after each row.
        """
        assert self.prediction is not None
        normed_rows = self.kernels.rms_norm(hidden, self.final_norm, self.epsilon)
        return self.prediction.enter(self.embed(token_ids), normed_rows)

    def predict_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] after that block -> [m] the most likely token after the next one."""
        assert self.prediction is not None
        return self.prediction.logits(hidden, self.head).argmax(dim=-1)

    @property
    def num_parameters(self) -> int:
        """Parameters in this process. Tied ones count once."""
        num_plain = sum(weight.numel() for weight in self._weights() if _has_numbers(weight))
        return num_plain + sum(weights.packed_numbers for weights in self.experts.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of these parameters as stored in memory."""
        return sum(weight.nbytes for weight in self._weights())

    def _weights(self) -> list[Weight]:
        routed_experts = tuple(self.experts.values())
        parts = (
            *(self.embedding, self.blocks, self.final_norm, self.head, self.head_bias),
            *(routed_experts, self.prediction),
        )
        weights = [
            weight for weight in _walk(parts) if _has_numbers(weight) or number_dtype(weight) is torch.uint8
        ]
        # A head that is tied to the embedding is the same memory, and counts once.
        return list({(weight.data_ptr(), weight.shape): weight for weight in weights}.values())


def _has_numbers(weight: Weight) -> bool:
    """False for the bytes of an expert and for tables of integers."""
    return isinstance(weight, QuantizedMatrix) or weight.is_floating_point()


def _walk(part: object) -> Iterator[Weight]:
    """Yields every weight in nested dataclasses and tuples. Rotary tables and constants are none."""
    if isinstance(part, torch.Tensor | QuantizedMatrix):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _walk(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            if field.name not in ("rope", "centring"):
                yield from _walk(getattr(part, field.name))
