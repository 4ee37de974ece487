"""Steps that run operation by operation."""

from __future__ import annotations

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import ExpertRequest, RoutedExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.moving import move_array
from moesaic.runtime.step.running_step import RunningStep, StepGenerator, StepResult
from moesaic.runtime.step.stages import BlockStages


class EagerRunner:
    """Runs any step, and steps that begin between two layers."""

    def __init__(self, stages: BlockStages, experts: RoutedExperts) -> None:
        self.stages = stages
        self.experts = experts

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Begin a step. Without rows it still sends an empty request to the experts of each layer."""
        return self.begin_layers(range(len(self.stages.model.blocks)), batch)

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """Begin a step after the experts of the first `segment` routed layers."""
        first = self.stages.model.spec.moe_layers[segment - 1] + 1
        return self.begin_layers(range(first, len(self.stages.model.blocks)), batch, hidden)

    def begin_layers(
        self, layers: range, batch: TokenBatch, hidden: torch.Tensor | None = None
    ) -> RunningStep:
        """Begin a step through these layers only. hidden: [n, h] before the first one; None: embeddings."""
        generator = self._rows(layers, batch, hidden) if batch.num_rows else self._no_rows(layers)
        return RunningStep(self.experts, generator)

    def _rows(self, layers: range, batch: TokenBatch, hidden: torch.Tensor | None) -> StepGenerator:
        device = self.stages.device
        attention = AttentionBatch.build(batch, self.stages.block_size, device)
        positions = move_array(batch.positions, device)
        token_ids = move_array(batch.token_ids, device)
        result = yield from self.stages.run(token_ids, positions, attention, hidden, layers)
        logit_hidden = result.hidden[move_array(batch.logit_rows, device)]
        all_hidden = None if self.stages.model.prediction is None else result.hidden
        return StepResult(logit_hidden, expert_ids=result.expert_ids, rows=all_hidden)

    def _no_rows(self, layers: range) -> StepGenerator:
        """Servers that wait for the rows of every worker wait for this worker's empty requests too."""
        spec, device = self.stages.model.spec, self.stages.device
        hidden = torch.zeros((0, spec.hidden_size), device=device)
        ids = torch.zeros((0, spec.top_k), dtype=torch.int64, device=device)
        for layer in layers:
            if not self.stages.model.block(layer).is_routed:
                continue
            yield ExpertRequest(layer, hidden, ids)
            yield None
        return StepResult(hidden)
