"""Drafts tokens with the model's own layer for the token after the next one (multi-token prediction).

It runs after a step has sampled, over the rows of that step whose next token is known then. Its keys and
values are in the KV cache behind those of the other layers, in the same blocks. So it follows chunks of
prompts, reused prefixes and preempted requests. At the end of a reused prefix its cached row has seen another
next token. That can only make a draft worse: a step checks each one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import ExpertRequest, RoutedExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.models.prediction import PredictionLayer
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.sampling.checking import Sampled
from moesaic.runtime.step.running_step import StepResult
from moesaic.runtime.step.stages import BlockStages, until_gate


@dataclass(frozen=True)
class Predictor:
    """Runs that layer over the rows of steps."""

    layer: PredictionLayer
    stages: BlockStages
    """Of the model."""
    experts: RoutedExperts

    def propose(self, plan: StepPlan, result: StepResult, found: Sampled) -> IntArray:
        """[p] the token that may follow the new ones of each entry of plan.sampled.

        result: of the step. found: its new tokens.
        """
        batch, rows = known_rows(plan, found)
        device, model = self.stages.device, self.stages.model
        hidden = result.hidden if result.rows is None else result.rows
        normed = model.kernels.rms_norm(
            hidden[torch.from_numpy(rows).to(device)], model.final_norm, model.epsilon
        )
        embedded = model.embed(torch.from_numpy(batch.token_ids).to(device))
        last = self._block(batch, self.layer.enter(embedded, normed))
        wanted = last[torch.from_numpy(batch.logit_rows).to(device)]
        if not len(wanted):
            return np.zeros(0, dtype=np.int64)
        tokens: IntArray = self.layer.logits(wanted, model.head).argmax(dim=-1).cpu().numpy()
        return tokens

    def _block(self, batch: TokenBatch, hidden: torch.Tensor) -> torch.Tensor:
        """The stages of the layer's block: [n, h] -> [n, h]."""
        stages, number, block = self.stages, self.layer.layer, self.layer.block
        attention = AttentionBatch.build(batch, stages.block_size, stages.device)
        positions = torch.from_numpy(batch.positions).to(stages.device)
        gated = until_gate(block, number, hidden, positions, attention, stages.memory)
        assert gated.expert_ids is not None
        handle = self.experts.submit(ExpertRequest(number, gated.normed, gated.expert_ids))
        answer = self.experts.poll(handle)
        assert answer is not None, "experts of this process answer at once"
        merged = block.merge(gated, block.dense(gated.normed), answer)
        self.experts.release(handle)
        return merged


def known_rows(plan: StepPlan, found: Sampled) -> tuple[TokenBatch, IntArray]:
    """The rows of a step that count, each with the token after it as its input.

    Their numbers in the step are returned beside them. Rows of wrong drafted tokens do not count. logit_rows
    are the last ones of plan.sampled.
    """
    batch = plan.batch
    counts = np.ones(len(plan.sampled), np.int64) if found.counts is None else found.counts
    drafted = plan.drafted if len(plan.drafted) else np.zeros(len(plan.sampled), np.int64)
    stops, following = batch.query_starts[1:].copy(), plan.following.copy()
    stops[plan.sampled] -= drafted - (counts - 1)
    newest = found.tokens[np.cumsum(counts) - 1] if len(counts) else found.tokens
    following[plan.sampled] = np.maximum(newest, 0)  # an answer that ended without a token needs no draft
    lengths = stops - batch.query_starts[:-1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(starts[-1]) + np.repeat(batch.query_starts[:-1] - starts[:-1], lengths)
    tokens = np.append(batch.token_ids, 0)[rows + 1]
    tokens[starts[1:] - 1] = following
    known = TokenBatch(
        token_ids=tokens,
        positions=batch.positions[rows],
        query_starts=starts,
        context_lens=batch.positions[stops - 1] + 1,
        block_tables=batch.block_tables,
        logit_rows=starts[plan.sampled + 1] - 1,
    )
    return known, rows
