"""Runs the model place by place, with rows of any requests: the mechanism under the asynchronous brain."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.experts.client import Ticket
from moesaic.experts.remote import RemoteExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Block, Gated
from moesaic.models.model import Model
from moesaic.policy.brain.actions import PartsArrived, RunLayer, Source
from moesaic.runtime.forward import to_gate
from moesaic.runtime.walk import Combine


@dataclass(frozen=True)
class _Asked:
    """A run whose experts were asked: all that its rows need to go on. Residuals never leave the worker."""

    block: Block
    gated: Gated
    dense: torch.Tensor | None
    ticket: Ticket


class Layered:
    """Keeps the rows of every run until the brain forgets it."""

    def __init__(
        self,
        model: Model,
        experts: RemoteExperts,
        kv: PagedKV,
        block_size: int,
        device: torch.device,
        combine: Combine,
    ) -> None:
        self._model = model
        self._experts = experts
        self._kv = kv
        self._block_size = block_size
        self._device = device
        self._combine = combine
        self._runs: dict[int, _Asked] = {}
        self._run_of: dict[int, int] = {}
        """Ticket -> run."""

    def run(self, action: RunLayer) -> torch.Tensor | None:
        """Carry out one run. At the last place: hidden states [m, h] of the batch's logit_rows, else None."""
        batch = action.plan.batch
        attention = AttentionBatch.build(batch, self._block_size, self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        first = 0
        if action.place == 0:
            hidden = self._model.embed(torch.from_numpy(batch.token_ids).to(self._device))
        else:
            hidden = torch.cat([self._merged(source) for source in action.sources])
            first = self._model.spec.moe_layers[action.place - 1] + 1
        for layer in range(first, len(self._model.blocks)):
            block = self._model.blocks[layer]
            gated = to_gate(block, layer, hidden, positions, attention, self._kv)
            if gated.expert_ids is not None:
                ask, gated = self._combine.ask(layer, gated)
                ticket = self._experts.submit(ask)
                self._run_of[ticket.number] = action.plan.step
                dense = block.dense(gated.normed)
                self._runs[action.plan.step] = _Asked(block, gated, dense, ticket)
                return None
            hidden = block.merge(gated, block.dense(gated.normed), None)
        return hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def chosen(self, run: int) -> torch.Tensor:
        """[n, k] the expert ids of a run's rows, at the layer whose experts it asked."""
        chosen = self._runs[run].gated.expert_ids
        assert chosen is not None
        return chosen

    def arrived(self) -> list[PartsArrived]:
        """What the experts answered since the last call: one event, so that the brain sees all of it before
        it chooses."""
        news = [(self._run_of.get(ticket.number), pairs) for ticket, pairs in self._experts.arrivals()]
        parts = [(run, pairs) for run, pairs in news if run is not None]
        return [PartsArrived(parts)] if parts else []

    def forget(self, runs: list[int]) -> None:
        """Nobody needs these runs any more. Runs that broke off before they asked are unknown."""
        for run in runs:
            asked = self._runs.pop(run, None)
            if asked is not None:
                del self._run_of[asked.ticket.number]
                self._experts.release(asked.ticket)

    def _merged(self, source: Source) -> torch.Tensor:
        """Hidden states of these rows after the experts of their last layer."""
        asked, part = self._runs[source.run], slice(source.start, source.stop)
        gated = asked.gated
        assert gated.expert_ids is not None and gated.weights is not None
        mine = Gated(gated.residual[part], gated.normed[part], gated.expert_ids[part], gated.weights[part])
        dense = None if asked.dense is None else asked.dense[part]
        rows = self._experts.rows(asked.ticket)[part].to(self._device)
        return asked.block.merge(mine, dense, rows)
