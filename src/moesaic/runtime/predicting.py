"""Drafts tokens with the model's own layer for the token after the next one (multi-token prediction).

It runs after a step has sampled, over the rows of that step whose next token is known then. Its keys and
values are in the KV cache behind those of the other layers, in the same blocks. So it follows chunks of
prompts, reused prefixes and preempted requests. At the end of a reused prefix its cached row has seen another
next token. That can only make a draft worse: a step checks each one.

Where decode steps are recorded as CUDA graphs, so is what it does after them.

Question: Who drafts tokens (`--speculative-config`)?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.sampling.checking import SampledTokens
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.running_step import Step, StepResult


class Predictor(Protocol):
    """Runs that layer over the rows of steps."""

    def begin(self, plan: StepPlan, result: StepResult, new_tokens: SampledTokens) -> Step:
        """Begin a step through that layer. It keeps nothing of `result`, so another step may begin.

        result: of the step of `plan`. new_tokens: its new tokens. The hidden states [p, h] of the new step
        are those from which `Model.predict_token` takes the token that may follow each of
        `plan.sampled_sequences`.
        """
        ...


@runtime_checkable
class PredictionRunner(Protocol):
    """Replays the layer that predicts the token after the next one."""

    def records(self, batch: TokenBatch) -> bool:
        """Whether that layer is replayed after this step."""
        ...

    def begin_prediction(self, batch: TokenBatch, hidden: torch.Tensor, rows: IntArray) -> Step:
        """Begin that layer after a step that `records` is true of.

        batch: what `select_known_rows` returns, at least one row. hidden: [n, h] of all rows of the step,
        of which those with these numbers go on. Nothing of it is kept.
        """
        ...


@dataclass(frozen=True)
class LayerPredictor:
    """A `Predictor` in the process that runs the stages of a step."""

    runner: EagerRunner
    graphs: PredictionRunner | None = None
    """Records what follows decode steps. None: nothing is recorded."""

    def begin(self, plan: StepPlan, result: StepResult, new_tokens: SampledTokens) -> Step:
        """Begin the drafting after a step. Without rows it still sends an empty request to the experts."""
        model, device = self.runner.stages.model, self.runner.stages.device
        assert model.prediction is not None
        batch, rows = select_known_rows(plan, new_tokens)
        hidden = result.hidden if result.rows is None else result.rows
        if batch.num_rows and self.graphs is not None and self.graphs.records(plan.batch):
            return self.graphs.begin_prediction(batch, hidden, rows)
        known_hidden = hidden[torch.from_numpy(rows).to(device)]
        prediction_input = model.enter_prediction(known_hidden, torch.from_numpy(batch.token_ids).to(device))
        layer = model.prediction.layer
        return self.runner.begin_layers(range(layer, layer + 1), batch, prediction_input)


def select_known_rows(plan: StepPlan, new_tokens: SampledTokens) -> tuple[TokenBatch, IntArray]:
    """The rows of a step that count, each with the token after it as its input.

    Their numbers in the step are returned beside them. Rows of wrong drafted tokens do not count. logit_rows
    are the last ones of plan.sampled.
    """
    batch = plan.batch
    counts = (
        np.ones(len(plan.sampled_sequences), np.int64) if new_tokens.counts is None else new_tokens.counts
    )
    num_drafted = (
        plan.num_draft_tokens
        if len(plan.num_draft_tokens)
        else np.zeros(len(plan.sampled_sequences), np.int64)
    )
    stops, following = batch.query_starts[1:].copy(), plan.following.copy()
    stops[plan.sampled_sequences] -= num_drafted - (counts - 1)
    newest = new_tokens.tokens[np.cumsum(counts) - 1] if len(counts) else new_tokens.tokens
    following[plan.sampled_sequences] = np.maximum(
        newest, 0
    )  # an answer that ended without a token needs no draft
    lengths = stops - batch.query_starts[:-1]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(starts[-1]) + np.repeat(batch.query_starts[:-1] - starts[:-1], lengths)
    tokens = np.append(batch.token_ids, 0)[rows + 1]
    tokens[starts[1:] - 1] = following
    known_batch = TokenBatch(
        token_ids=tokens,
        positions=batch.positions[rows],
        query_starts=starts,
        context_lens=batch.positions[stops - 1] + 1,
        block_tables=batch.block_tables,
        logit_rows=starts[plan.sampled_sequences + 1] - 1,
    )
    return known_batch, rows
