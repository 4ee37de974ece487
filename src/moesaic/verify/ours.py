"""Computes a prompt layer by layer, as a worker does, with one layer in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.kvcache.memory import CacheSize, layer_memory
from moesaic.models import registry
from moesaic.models.spec import ModelSpec
from moesaic.runtime.step.stages import until_gate

BLOCK = 16
"""Tokens of a block of the KV cache."""


class Ours:
    """moesaic's side: the stages of a worker's step, on the CPU.

    Hidden states go in and out as the model defines them. Blocks may compute with smaller ones, by a factor.
    """

    def __init__(self, path: Path, spec: ModelSpec, kernels: Kernels, tokens: list[int]) -> None:
        self._path, self._spec, self._kernels = path, spec, kernels
        self._residual = registry.residual(path)
        count = len(tokens)
        self._blocks = -(-count // BLOCK)
        self._batch = TokenBatch(
            token_ids=np.array(tokens, dtype=np.int64),
            positions=np.arange(count, dtype=np.int64),
            query_starts=np.array([0, count], dtype=np.int64),
            context_lens=np.array([count], dtype=np.int64),
            block_tables=np.arange(self._blocks, dtype=np.int64)[None],
            logit_rows=np.arange(count, dtype=np.int64),
            states=np.array([[0, 0, 1, 0]]),
        )

    def embed(self) -> torch.Tensor:
        """Returns the embeddings [n, h] of the prompt."""
        outside = registry.load_outside(self._path, self._kernels)
        return outside.embed(torch.from_numpy(self._batch.token_ids)) * self._residual

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] before a layer -> [n, h] after it."""
        count = self._batch.num_rows
        block, experts = registry.load_layer(self._path, self._kernels, layer, count)
        cpu = torch.device("cpu")
        states = (0,) if layer in self._spec.state_layers else ()
        one = replace(self._spec, num_layers=1, state_layers=states)
        memory = layer_memory(one, CacheSize(self._blocks, seats=1), BLOCK, torch.float32, cpu, self._kernels)
        attention = AttentionBatch.build(self._batch, BLOCK)
        positions = torch.from_numpy(self._batch.positions)
        gated = until_gate(block, 0, hidden / self._residual, positions, attention, memory)
        rows = None
        if experts is not None and gated.expert_ids is not None:
            rows = self._kernels.experts(experts, gated.normed, gated.expert_ids)
        return block.merge(gated, block.dense(gated.normed), rows) * self._residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] after the last layer -> logits [n, V]."""
        return registry.load_outside(self._path, self._kernels).logits(hidden / self._residual)
