"""A step on every rank of a group: attention over the rank's own heads, the form of the group between.

The first rank has the brain, the sampler and the engine's ear; the others are told each step and compute it
too. All have the same KV blocks under the same numbers, each with the keys and values of its own heads.
"""

from __future__ import annotations

import torch

from moesaic.collectives.group import Group
from moesaic.core.metrics import ExpertStats, GroupStats
from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import DirectExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Kernels
from moesaic.kvcache.paged import PagedKV
from moesaic.models.model import Model
from moesaic.runtime.forward import to_partial
from moesaic.runtime.tensor.counted import Counted
from moesaic.runtime.tensor.crew import Crew
from moesaic.runtime.tensor.forms import Form, dense_feed_forward
from moesaic.runtime.tensor.steps import pack, unpack
from moesaic.runtime.walk import Stages, Walk


class InGroup(DirectExperts):
    """Steps ask nobody: the experts are inside the form. What remains is what was counted."""

    def __init__(self, kernels: Kernels, group: Group, counted: Counted) -> None:
        super().__init__({}, kernels)
        self._group, self._counted = group, counted

    def stats(self) -> ExpertStats:
        traffic, counted = self._group.traffic, self._counted
        return ExpertStats(
            group=GroupStats(
                all_reduce_bytes=traffic.all_reduce,
                reduce_scatter_bytes=traffic.reduce_scatter,
                all_gather_bytes=traffic.all_gather,
                all_to_all_bytes=traffic.all_to_all,
                metadata_bytes=traffic.metadata,
                **vars(counted),
            )
        )


class Sharded:
    """What Forward is for one process."""

    def __init__(
        self, model: Model, kv: PagedKV, block_size: int, group: Group, form: Form, counted: Counted
    ) -> None:
        self.crew: Crew | None = None
        """The other ranks' processes, of the first rank."""
        self._model, self._kv, self._block_size = model, kv, block_size
        self._group, self.form = group, form
        self.experts = InGroup(model.kernels, group, counted)

    def begin(self, batch: TokenBatch) -> Walk:
        """On the first rank: start a step on all of them."""
        self._group.announce(pack(batch))
        return Walk(self.experts, self._stages(batch))

    def follow(self) -> None:
        """On the others: compute what the first one begins, until it is gone. Raises ConnectionLost then."""
        with torch.inference_mode():
            while True:
                self._hidden(unpack(self._group.announce(b"")))

    def _stages(self, batch: TokenBatch) -> Stages:
        yield from ()  # it waits inside the collectives and nowhere else
        return self._hidden(batch)[torch.from_numpy(batch.logit_rows)]

    def _hidden(self, batch: TokenBatch) -> torch.Tensor:
        """[n, h] after the last block."""
        attention = AttentionBatch.build(batch, self._block_size, torch.device("cpu"))
        positions = torch.from_numpy(batch.positions)
        hidden = self._model.embed(torch.from_numpy(batch.token_ids))
        self.form.begin(batch.token_ids)
        for layer, block in enumerate(self._model.blocks):
            partial = to_partial(block, layer, hidden, positions, attention, self._kv)
            if block.routed:
                hidden = self.form.feed_forward(layer, block, hidden, partial)
            else:
                hidden = dense_feed_forward(self._group, block, hidden, partial)
        return hidden
