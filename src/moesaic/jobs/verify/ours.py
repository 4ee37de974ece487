"""Computes a prompt layer by layer, as a worker does, with one layer in memory at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from moesaic.kernels.table import Kernels
from moesaic.models import registry
from moesaic.models.spec import ModelSpec
from moesaic.runtime.step.one_prompt import OnePrompt


class Ours:
    """moesaic's side: the stages of a worker's step, on the CPU.

    Hidden states go in and out as the model defines them. Blocks may compute with smaller ones, by a factor.
    """

    def __init__(self, path: Path, spec: ModelSpec, kernels: Kernels, tokens: list[int]) -> None:
        self._path, self._kernels = path, kernels
        self._residual = registry.residual(path)
        self._prompt = OnePrompt(spec, kernels, tokens)

    def embed(self) -> torch.Tensor:
        """Returns the embeddings [n, h] of the prompt."""
        outside = registry.load_outside(self._path, self._kernels)
        return outside.embed(self._prompt.token_ids) * self._residual

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] before a layer -> [n, h] after it."""
        block, experts = registry.load_layer(self._path, self._kernels, layer, len(hidden))
        gated = self._prompt.until_gate(layer, block, hidden / self._residual)
        rows = None
        if experts is not None and gated.expert_ids is not None:
            rows = self._kernels.experts(experts, gated.normed_rows, gated.expert_ids)
        return block.merge(gated, block.dense(gated.normed_rows), rows) * self._residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] after the last layer -> logits [n, V]."""
        return registry.load_outside(self._path, self._kernels).logits(hidden / self._residual)
