"""One step through the model: the stages of every block, in order, layer after layer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import RoutedExperts, Ticket
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Recorder, Recording
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Block, Gated
from moesaic.models.model import Model

Stages = Generator[Ticket, torch.Tensor, torch.Tensor]
"""Yields the ticket it waits for, is sent the answer, returns hidden states."""
RECORDED_ROWS = 64
"""Decode steps of more rows are not recorded: Python's share of their time is small."""


class Forward:
    """Walks the stages: operation by operation, or, for decode steps, by replaying a recorded walk.

    A recording holds the native operations of this process and nothing else: record only where the experts
    are answered by a direct call.
    """

    def __init__(
        self,
        model: Model,
        experts: RoutedExperts,
        kv: PagedKV,
        block_size: int,
        device: torch.device,
        recorded_blocks: int = 0,
    ) -> None:
        """recorded_blocks: KV blocks of the longest sequence, to record decode steps for; 0: never record."""
        self._model = model
        self._experts = experts
        self._kv = kv
        self._block_size = block_size
        self._device = device
        self._width = recorded_blocks
        make = model.kernels.recorder if recorded_blocks else None
        self._recorder: Recorder | None = None if make is None else make()
        self._decodes: dict[int, _Decode] = {}

    def begin(self, batch: TokenBatch) -> Walk:
        """Start a step. `Walk.advance` goes on with it whenever the experts have answered."""
        rows = batch.num_rows
        if not rows:
            return Walk(self._experts, self._only_experts())
        decode = rows == batch.num_sequences == len(batch.logit_rows)
        if self._recorder is not None and decode and rows <= RECORDED_ROWS:
            return Walk(self._experts, _done(self._replay(batch, self._recorder)))
        return Walk(self._experts, self._last_rows(batch))

    def _only_experts(self) -> Stages:
        """A step without rows: whoever waits for everybody's rows at each layer waits for these too."""
        hidden = torch.zeros((0, self._model.spec.hidden_size), device=self._device)
        ids = torch.zeros((0, self._model.spec.top_k), dtype=torch.int64, device=self._device)
        for layer in self._model.spec.moe_layers:
            ticket = self._experts.submit(layer, hidden, ids)
            yield ticket
            self._experts.release(ticket)
        return hidden

    def _last_rows(self, batch: TokenBatch) -> Stages:
        attention = AttentionBatch.build(batch, self._block_size, self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        hidden = yield from self._walk(token_ids, positions, attention)
        return hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def _walk(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch) -> Stages:
        """Every stage of every block. Yields where it needs an answer; returns hidden states [n, h]."""
        hidden = self._model.embed(token_ids)
        for layer, block in enumerate(self._model.blocks):
            gated = to_gate(block, layer, hidden, positions, attention, self._kv)
            if gated.expert_ids is None:
                hidden = block.merge(gated, block.dense(gated.normed), None)
                continue
            ticket = self._experts.submit(layer, gated.normed, gated.expert_ids)
            dense = block.dense(gated.normed)
            answer = yield ticket
            hidden = block.merge(gated, dense, answer)
            self._experts.release(ticket)
        return hidden

    def _replay(self, batch: TokenBatch, recorder: Recorder) -> torch.Tensor:
        """A decode step. The first one of its size is recorded."""
        decode = self._decodes.get(batch.num_rows)
        if decode is not None:
            decode.fill(batch)
            return decode.recording.run()
        attention = AttentionBatch.of_decode(batch, self._block_size, self._width)
        inputs = attention.batch
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        walk = Walk(self._experts, self._walk(token_ids, positions, attention))
        recording = recorder(walk.finish)
        self._decodes[batch.num_rows] = _Decode(attention, recording)
        return recording.result


def to_gate(
    block: Block,
    layer: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    kv: PagedKV,
) -> Gated:
    """The stages of a block up to its gate; the rows' keys and values are in the cache then."""
    rows = block.pre_attention(hidden, positions)
    kv.write(layer, rows.key, rows.value, attention.slots)
    attended = block.attention(rows.query, kv.keys(layer), kv.values(layer), attention)
    return block.gate(hidden, block.output_projection(attended))


class Walk:
    """A step under way: suspended where it waits for experts, so that another may run meanwhile."""

    def __init__(self, experts: RoutedExperts, stages: Stages) -> None:
        self._experts = experts
        self._stages = stages
        self._ticket: Ticket | None = None

    def advance(self) -> torch.Tensor | None:
        """Go on as far as answers are there. Returns hidden states [m, h] of the batch's logit_rows after the
        last block, before the final norm, once; None: it waits for experts. The keys and values of all rows
        are in the cache then, and the result holds until the next step."""
        try:
            if self._ticket is None:
                self._ticket = next(self._stages)
            while (answer := self._experts.poll(self._ticket)) is not None:
                self._ticket = self._stages.send(answer)
        except StopIteration as end:
            hidden: torch.Tensor = end.value
            return hidden
        return None

    @property
    def ready(self) -> bool:
        """Whether `advance` would get any further."""
        return self._ticket is None or self._experts.poll(self._ticket) is not None

    def finish(self) -> torch.Tensor:
        """`advance` to the end, where experts answer at once."""
        hidden = self.advance()
        if hidden is None:
            raise RuntimeError("this step waits for experts")
        return hidden


def _done(hidden: torch.Tensor) -> Stages:
    """A walk that is over."""
    yield from ()
    return hidden


@dataclass(frozen=True)
class _Decode:
    """A recorded decode step and the arrays it reads."""

    attention: AttentionBatch
    recording: Recording

    def fill(self, batch: TokenBatch) -> None:
        """Put another step's rows where the recording reads."""
        inputs = self.attention.batch
        np.copyto(inputs.token_ids, batch.token_ids)
        np.copyto(inputs.positions, batch.positions)
        np.copyto(inputs.context_lens, batch.context_lens)
        inputs.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        self.attention.fill_slots()
