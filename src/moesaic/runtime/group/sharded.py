"""A step on every rank of a group: attention over the rank's own heads, the form of the group between.

The first rank has the scheduler, the sampler and the engine's ear; the others are told each step and compute
it too. All have the same KV blocks under the same numbers, each with the keys and values of its own heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from moesaic.collectives.group import Group
from moesaic.core.errors import ConnectionLost, MoesaicError
from moesaic.core.metrics import ExpertStats, GroupStats, PassStats
from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import DirectExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.kvcache.paged import PagedKV
from moesaic.models.model import Model
from moesaic.runtime.group.collective_layouts import CollectiveLayout, dense_feed_forward
from moesaic.runtime.group.counts import GroupCounts
from moesaic.runtime.group.host_copies import to_device
from moesaic.runtime.group.launcher import RankLauncher
from moesaic.runtime.group.step_arrays import pack, unpack
from moesaic.runtime.step.forward import to_partial
from moesaic.runtime.step.running_step import RunningStep, StepGenerator

Run = Callable[[TokenBatch], torch.Tensor]
"""A step on one rank: hidden states [m, h] of the logit_rows after the last block."""


class InGroup(DirectExperts):
    """Steps ask nobody: the experts are inside the form. What remains is what was counted."""

    def __init__(
        self,
        kernels: Kernels,
        group: Group,
        counted: GroupCounts,
        passes: Callable[[], tuple[PassStats, ...]] = tuple,
    ) -> None:
        """passes: so far, of a model that is larger than the fast memory."""
        super().__init__({}, kernels, rows=0)
        self._group, self._counted, self._passes = group, counted, passes

    def stats(self) -> ExpertStats:
        traffic, counted = self._group.traffic, self._counted
        return ExpertStats(
            passes=self._passes(),
            group=GroupStats(
                all_reduce_bytes=traffic.all_reduce,
                reduce_scatter_bytes=traffic.reduce_scatter,
                all_gather_bytes=traffic.all_gather,
                all_to_all_bytes=traffic.all_to_all,
                metadata_bytes=traffic.metadata,
                **vars(counted),
            ),
        )


class RankSteps:
    """What Forward is for one process. The rank's end of the group is closed with it."""

    def __init__(self, run: Run, group: Group, collectives: str, experts: InGroup) -> None:
        """form: its name, for people."""
        self.launcher: RankLauncher | None = None
        """The other ranks' processes, of the first rank."""
        self.collectives, self.experts = collectives, experts
        self._run, self._group = run, group
        weakref.finalize(self, group.close)

    def begin(self, batch: TokenBatch) -> RunningStep:
        """On the first rank: start a step on all of them."""
        try:
            self._group.announce(pack(batch))
        except ConnectionLost as lost:
            raise self._told(lost) from None
        return RunningStep(self.experts, self._stages(batch))

    def follow(self) -> None:
        """On the others: compute what the first one begins, until it is gone. Raises ConnectionLost then."""
        with torch.inference_mode():
            while True:
                self._run(unpack(self._group.announce(b"")))

    def _stages(self, batch: TokenBatch) -> StepGenerator:
        yield from ()  # it waits inside the collectives and nowhere else
        try:
            return self._run(batch)
        except ConnectionLost as lost:
            self._group.close()  # the others stand in the middle of a step; so below
            raise self._told(lost) from None
        except BaseException:
            self._group.close()
            raise

    def _told(self, lost: ConnectionLost) -> MoesaicError:
        return lost if self.launcher is None else self.launcher.why(lost)


class ModelInMemory:
    """Steps over a model that is in memory, heads and experts of this rank."""

    def __init__(
        self, model: Model, kv: PagedKV, block_size: int, group: Group, collectives: CollectiveLayout
    ) -> None:
        self._model, self._kv, self._block_size = model, kv, block_size
        self._group, self._collectives = group, collectives

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """See `Run`."""
        device = self._kv.device
        attention = AttentionBatch.build(batch, self._block_size, device)
        positions = to_device(batch.positions, device)
        hidden = self._model.embed(to_device(batch.token_ids, device))
        self._collectives.begin(batch.token_ids)
        for layer, block in enumerate(self._model.blocks):
            partial = to_partial(block, layer, hidden, positions, attention, self._kv)
            if block.routed:
                hidden = self._collectives.feed_forward(layer, block, hidden, partial)
            else:
                hidden = dense_feed_forward(self._group, block, hidden, partial)
        return hidden[to_device(batch.logit_rows, device)]
