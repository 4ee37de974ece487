"""A step on every rank of a group: attention over the rank's own heads, collectives between the blocks.

The first rank has the scheduler, the sampler and the connection to the engine. It announces each step to the
others, which compute the step too. All ranks have the same KV blocks under the same numbers, each with the
keys and values of its own heads.

Question: Where is tensor parallelism computed (`--tensor-parallel-size`)?
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import ExpertStats, GroupStats, PassStats
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.moving import move_array
from moesaic.models.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.group.arrays import pack, unpack
from moesaic.runtime.group.collective_layouts import CollectiveLayout, dense_feed_forward
from moesaic.runtime.group.exchanges import Stages, run_at_once
from moesaic.runtime.group.experts import GroupCounts
from moesaic.runtime.group.launcher import RankLauncher
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.predicting import select_known_rows
from moesaic.runtime.prefix_cache.part import OwnPart
from moesaic.runtime.sampling.checking import SampledTokens
from moesaic.runtime.step.running_step import StepResult, WholeStep
from moesaic.runtime.step.stages import until_output_projection

RunBatch = Callable[[TokenBatch], torch.Tensor]
"""Computes a step on one rank: hidden states [m, h] of the logit_rows after the last block."""
RunPrediction = Callable[[TokenBatch, IntArray], torch.Tensor]
"""Computes the layer that predicts the token after the next one, on one rank: hidden states [m, h] of the
logit_rows behind it. The tokens are those that follow these rows [n] of the last step."""
_PREDICTION = -(1 << 61)
"""The first number of an announced prediction. The number of rows, the rows and the batch follow. Steps begin
with no negative number, and requests for KV with another one."""


class RankRunner:
    """The StepRunner of one rank. It closes its end of the group when it is deleted."""

    def __init__(
        self,
        run: RunBatch,
        rows: RowCollectives,
        memory: LayerMemory,
        collectives: str,
        counts: GroupCounts,
        passes: Callable[[], tuple[PassStats, ...]] = tuple,
        predict: RunPrediction | None = None,
    ) -> None:
        """collectives: name of the collective layout, for display.

        passes: statistics of the passes so far, for a model larger than the fast memory. predict: None: the
        model has no such layer, or need not.
        """
        self.launcher: RankLauncher | None = None
        """The processes of the other ranks; only the first rank has it."""
        self.memory = memory
        self.collectives = collectives
        self._run, self._predict = run, predict
        self._rows, self._group = rows, rows.group
        self._counts, self._passes = counts, passes
        weakref.finalize(self, rows.close)

    def begin(self, batch: TokenBatch) -> WholeStep:
        """On the first rank: begin a step on all ranks."""
        return WholeStep(partial(self._compute, pack(batch), partial(self._run, batch)))

    def begin_prediction(self, batch: TokenBatch, rows: IntArray) -> WholeStep:
        """On the first rank: begin the layer of `RunPrediction` on all ranks."""
        assert self._predict is not None
        message = np.array([_PREDICTION, len(rows), *rows]).tobytes() + pack(batch)
        return WholeStep(partial(self._compute, message, partial(self._predict, batch, rows)))

    def follow(self, prefixes: OwnPart | None = None) -> None:
        """On the other ranks: compute the steps of the first rank. Raises ConnectionLost when it is gone.

        prefixes: see `next_message`.
        """
        with torch.inference_mode():
            while True:
                batch, rows = _parse_message(next_message(self._group, self.memory, prefixes))
                if rows is None:
                    self._run(batch)
                elif self._predict is not None:
                    self._predict(batch, rows)

    def stats(self) -> ExpertStats:
        """What this rank counted."""
        traffic = self._rows.traffic
        return ExpertStats(
            passes=self._passes(),
            group=GroupStats(
                all_reduce_bytes=traffic.all_reduce,
                reduce_scatter_bytes=traffic.reduce_scatter,
                all_gather_bytes=traffic.all_gather,
                all_to_all_bytes=traffic.all_to_all,
                metadata_bytes=traffic.metadata,
                **vars(self._counts),
            ),
        )

    def _compute(self, message: bytes, run: Callable[[], torch.Tensor]) -> StepResult:
        """Announce a step and compute it. It waits inside the collectives only.

        After an error the group is closed, since the other ranks are in the middle of the step.
        """
        try:
            self._group.announce(message)
            return StepResult(run())
        except ConnectionLost as lost:
            self._rows.close()
            raise self._explain_loss(lost) from None
        except BaseException:
            self._rows.close()
            raise

    def _explain_loss(self, error: ConnectionLost) -> MoesaicError:
        return error if self.launcher is None else self.launcher.explain_loss(error)


def _parse_message(message: bytes) -> tuple[TokenBatch, IntArray | None]:
    """A step, or a prediction and its rows. Raises ConnectionLost for bytes that no first rank wrote."""
    numbers = np.frombuffer(message[: len(message) // 8 * 8], np.int64)
    if len(numbers) < 2 or numbers[0] != _PREDICTION:
        return unpack(message), None
    # A negative count must not read from the end of the message.
    count = int(numbers[1])
    batch, rows = unpack(message[8 * (2 + max(0, count)) :]), numbers[2 : 2 + max(0, count)].copy()
    if count != batch.num_rows:
        raise ConnectionLost(f"a prediction for {count} rows with a step of {batch.num_rows}")
    return batch, rows


@dataclass(frozen=True)
class GroupPredictor:
    """On the first rank: a `Predictor` over all ranks."""

    runner: RankRunner

    def begin(self, plan: StepPlan, result: StepResult, new_tokens: SampledTokens) -> WholeStep:
        """Begin the drafting on all ranks. Each rank still has the rows of `result`."""
        return self.runner.begin_prediction(*select_known_rows(plan, new_tokens))


class ShardedModel:
    """Runs steps over a model in memory, with the heads and experts of one rank."""

    def __init__(
        self,
        model: Model,
        memory: LayerMemory,
        device: torch.device,
        block_size: int,
        rows: RowCollectives,
        collectives: CollectiveLayout,
    ) -> None:
        self.model, self.device, self.block_size = model, device, block_size
        self.rows, self.collectives = rows, collectives
        self._memory = memory
        self._last: torch.Tensor | None = None
        """[n, h] all rows of the last step after the last block, where a layer goes on from them."""

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """Compute a step. Returns the hidden states [m, h] of its logit_rows after the last block."""
        device = self.device
        attention = AttentionBatch.build(batch, self.block_size, device)
        tokens, positions = move_array(batch.token_ids, device), move_array(batch.positions, device)
        stages = self.stages(tokens, positions, attention, batch.token_ids)
        hidden = run_at_once(stages, batch.num_rows)
        self.keep_rows(hidden)
        return hidden[move_array(batch.logit_rows, device)]

    def predict(self, batch: TokenBatch, rows: IntArray) -> torch.Tensor:
        """Compute the layer that drafts tokens, over these rows [n] of the last step. Returns [m, h]."""
        kept_rows, device = self.select_kept_rows(rows), self.device
        attention = AttentionBatch.build(batch, self.block_size, device)
        tokens, positions = move_array(batch.token_ids, device), move_array(batch.positions, device)
        stages = self.prediction(tokens, positions, attention, kept_rows, batch.token_ids)
        return run_at_once(stages, batch.num_rows)[move_array(batch.logit_rows, device)]

    def select_kept_rows(self, rows: IntArray) -> torch.Tensor:
        """[n, h] these rows of the last step. Raises ConnectionLost if it has no such rows."""
        last = self._last
        if self.model.prediction is None or last is None or not len(rows) or rows.max() >= len(last):
            raise ConnectionLost("a prediction for rows of an unknown step")
        return last if len(rows) == len(last) else last[move_array(rows, self.device)]

    def stages(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        host_token_ids: IntArray,
    ) -> Stages:
        """All stages of a step, which return the hidden states [n, h] of all rows after the last block.

        host_token_ids: [n] what the host knows of the token ids.
        """
        self.collectives.begin(host_token_ids)
        hidden = self.model.embed(token_ids)
        return (yield from self._run_layers(range(len(self.model.blocks)), hidden, positions, attention))

    def prediction(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        hidden: torch.Tensor,
        host_token_ids: IntArray,
    ) -> Stages:
        """The stages of the layer that predicts the token after the next one.

        hidden: [n, h] of these rows after the last block. token_ids: [n] the token after each row.
        """
        layer = len(self.model.blocks)
        self.collectives.begin(host_token_ids)
        prediction_input = self.model.enter_prediction(hidden, token_ids)
        return (yield from self._run_layers(range(layer, layer + 1), prediction_input, positions, attention))

    def keep_rows(self, hidden: torch.Tensor) -> None:
        """Keep the rows [n, h] of a step after the last block, if a layer goes on from them."""
        self._last = None if self.model.prediction is None else hidden

    def _run_layers(
        self, layers: range, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch
    ) -> Stages:
        """hidden [n, h] before the first of these layers -> [n, h] after the last one."""
        for layer in layers:
            block = self.model.block(layer)
            partial = until_output_projection(block, layer, hidden, positions, attention, self._memory)
            if block.is_routed:
                hidden = yield from self.collectives.feed_forward(layer, block, hidden, partial)
            else:
                hidden = yield from dense_feed_forward(self.rows, block, hidden, partial)
        return hidden
