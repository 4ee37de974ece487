"""A prompt that is computed layer by layer, in a cache of its own, where only one layer is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.models.block import Block, GateOutput
from moesaic.models.kvcache.memory import CacheSize, layer_memory
from moesaic.models.spec import ModelSpec
from moesaic.runtime.step.stages import until_gate

BLOCK = 16
"""Tokens of a block of the KV cache."""


class OnePrompt:
    """The stages of a worker's step up to the gate, on the CPU, for all tokens of a prompt at once."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, tokens: Sequence[int]) -> None:
        self._spec, self._kernels = spec, kernels
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

    @property
    def token_ids(self) -> torch.Tensor:
        """[n] int64"""
        return torch.from_numpy(self._batch.token_ids)

    def until_gate(self, layer: int, block: Block, hidden: torch.Tensor) -> GateOutput:
        """hidden [n, h] before a layer, as its block has them -> the rows after its gate."""
        cpu = torch.device("cpu")
        states = (0,) if layer in self._spec.state_layers else ()
        one_layer_spec = replace(self._spec, num_layers=1, state_layers=states)
        memory = layer_memory(
            one_layer_spec, CacheSize(self._blocks, seats=1), BLOCK, torch.float32, cpu, self._kernels
        )
        attention = AttentionBatch.build(self._batch, BLOCK)
        return until_gate(block, 0, hidden, torch.from_numpy(self._batch.positions), attention, memory)
