"""The layer of some checkpoints that predicts the token after the next one (multi-token prediction).

It sees the hidden state of a position, behind the model's final norm as in vLLM and SGLang, and the token
that follows there. It has a cache and experts of its own. Embedding and LM head are the model's.

DeepSeek-AI, DeepSeek-V3, 2024, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.kernels.matrix import Weight
from moesaic.kernels.table import Kernels
from moesaic.models.block import Block


@dataclass(frozen=True)
class PredictionLayer:
    """The weights and the math of that layer."""

    layer: int
    """The number of this layer in the files. It follows the model's layers."""
    kernels: Kernels
    epsilon: float
    block: Block
    token_norm: torch.Tensor
    """[h] enorm"""
    hidden_norm: torch.Tensor
    """[h] hnorm"""
    projection: torch.Tensor
    """[h, 2h] eh_proj"""
    final_norm: torch.Tensor
    """[h] before the LM head"""

    def enter(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The rows [n, h] before its block.

        embeddings: [n, h] embedding of the token after each row. hidden: [n, h] rows of the model behind its
        final norm.
        """
        tokens = self.kernels.rms_norm(embeddings, self.token_norm, self.epsilon)
        states = self.kernels.rms_norm(hidden, self.hidden_norm, self.epsilon)
        return self.kernels.linear(torch.cat([tokens, states], dim=-1), self.projection)

    def logits(self, hidden: torch.Tensor, head: Weight) -> torch.Tensor:
        """hidden [m, h] behind its block -> [m, V] float32. head: [V, h]"""
        return self.kernels.linear(self.kernels.rms_norm(hidden, self.final_norm, self.epsilon), head)
