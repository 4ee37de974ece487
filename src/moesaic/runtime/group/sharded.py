"""A step on every rank of a group: attention over the rank's own heads, collectives between the blocks.

The first rank has the scheduler, the sampler and the connection to the engine. It announces each step to the
others, which compute the step too. All ranks have the same KV blocks under the same numbers, each with the
keys and values of its own heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import ExpertStats, GroupStats, PassStats
from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.runtime.group.arrays import pack, to_device, unpack
from moesaic.runtime.group.collective_layouts import CollectiveLayout, dense_feed_forward
from moesaic.runtime.group.experts import GroupCounts
from moesaic.runtime.group.launcher import RankLauncher
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.group.shared_images import next_message
from moesaic.runtime.step.running_step import StepResult, WholeStep
from moesaic.runtime.step.stages import until_output_projection

RunBatch = Callable[[TokenBatch], torch.Tensor]
"""Computes a step on one rank: hidden states [m, h] of the logit_rows after the last block."""


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
    ) -> None:
        """collectives: name of the collective layout, for display.

        passes: statistics of the passes so far, for a model larger than the fast memory.
        """
        self.launcher: RankLauncher | None = None
        """The processes of the other ranks; only the first rank has it."""
        self.memory = memory
        self.collectives = collectives
        self._run, self._rows, self._group = run, rows, rows.group
        self._counts, self._passes = counts, passes
        weakref.finalize(self, rows.close)

    def begin(self, batch: TokenBatch) -> WholeStep:
        """On the first rank: begin a step on all ranks."""
        try:
            self._group.announce(pack(batch))
        except ConnectionLost as lost:
            raise self._reason(lost) from None
        return WholeStep(partial(self._compute, batch))

    def follow(self) -> None:
        """On the other ranks: compute the steps of the first rank. Raises ConnectionLost when it is gone."""
        with torch.inference_mode():
            while True:
                self._run(unpack(next_message(self._group, self.memory)))

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

    def _compute(self, batch: TokenBatch) -> StepResult:
        """Compute a step. It waits inside the collectives only.

        After an error the group is closed, since the other ranks are in the middle of the step.
        """
        try:
            return StepResult(self._run(batch))
        except ConnectionLost as lost:
            self._rows.close()
            raise self._reason(lost) from None
        except BaseException:
            self._rows.close()
            raise

    def _reason(self, lost: ConnectionLost) -> MoesaicError:
        return lost if self.launcher is None else self.launcher.why(lost)


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
        self._model, self._memory, self._device, self._block_size = model, memory, device, block_size
        self._rows, self._collectives = rows, collectives

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """See `RunBatch`."""
        device = self._device
        attention = AttentionBatch.build(batch, self._block_size, device)
        positions = to_device(batch.positions, device)
        hidden = self._model.embed(to_device(batch.token_ids, device))
        self._collectives.begin(batch.token_ids)
        for layer, block in enumerate(self._model.blocks):
            partial = until_output_projection(block, layer, hidden, positions, attention, self._memory)
            if block.routed:
                hidden = self._collectives.feed_forward(layer, block, hidden, partial)
            else:
                hidden = dense_feed_forward(self._rows, block, hidden, partial)
        return hidden[to_device(batch.logit_rows, device)]
