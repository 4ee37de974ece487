"""One step through the model: the stages of every block, in order, layer after layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import ExpertRequest, RoutedExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.kvcache.paged import PagedKV
from moesaic.models.block import Block, Gated
from moesaic.models.model import Model
from moesaic.runtime.step.running_step import (
    ChosenExperts,
    Combine,
    PendingMerge,
    RunningStep,
    StepDropped,
    StepGenerator,
)

RECORDED_ROWS = 64
"""Decode steps of more rows are not recorded: Python's share of their time is small."""


class Forward:
    """Walks the stages: operation by operation, or, for decode steps, by replaying a recorded walk.

    A recording holds the native operations of this process and nothing else. Where the experts are answered
    by a direct call that is the whole step; else it stops at each question and at each answer.
    """

    def __init__(
        self,
        model: Model,
        experts: RoutedExperts,
        kv: PagedKV,
        block_size: int,
        device: torch.device,
        recorded_blocks: int = 0,
        combine: Combine | None = None,
    ) -> None:
        """recorded_blocks: KV blocks of the longest sequence, to record decode steps for; 0: never record.
        combine: of experts that are not answered by a direct call; None: they are.
        """
        self._model = model
        self._experts = experts
        self._kv = kv
        self._block_size = block_size
        self._device = device
        self._width = recorded_blocks
        self._apart = combine is not None
        self._combine = combine or Combine(False, 0, 0, device)
        self._make_recorder = model.kernels.recorder if recorded_blocks else None
        self._free = [_Recorded(self._make_recorder())] if self._make_recorder else []
        """Those that no step under way uses: two steps must not share memory."""
        self._logits: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the id of the hidden states that a recorded step returns each time: these, and their logits if
        the step computes them too."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h], as a walk returned it -> [m, V] float32, good until the next step."""
        _, logits = self._logits.get(id(hidden), (None, None))
        return self._model.logits(hidden) if logits is None else logits

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Start a step. `RunningStep.advance` goes on with it whenever the experts have answered."""
        rows = batch.num_rows
        if not rows:
            return RunningStep(self._experts, self._only_experts())
        chosen: ChosenExperts = []
        decode = rows == batch.num_sequences == len(batch.logit_rows)
        if self._make_recorder is not None and decode and rows <= RECORDED_ROWS:
            recorded = self._free.pop() if self._free else _Recorded(self._make_recorder())
            return RunningStep(self._experts, self._recorded(batch, recorded, chosen), chosen)
        return RunningStep(self._experts, self._last_rows(batch, chosen), chosen)

    def begin_behind(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """As `begin`, of rows [n, h] that the experts of `segment` layers have answered already."""
        first = self._model.spec.moe_layers[segment - 1] + 1
        return RunningStep(self._experts, self._last_rows(batch, [], hidden, first))

    def _only_experts(self) -> StepGenerator:
        """A step without rows: whoever waits for everybody's rows at each layer waits for these too."""
        hidden = torch.zeros((0, self._model.spec.hidden_size), device=self._device)
        ids = torch.zeros((0, self._model.spec.top_k), dtype=torch.int64, device=self._device)
        for layer in self._model.spec.moe_layers:
            yield ExpertRequest(layer, hidden, ids)
            yield None
        return hidden

    def _last_rows(
        self, batch: TokenBatch, chosen: ChosenExperts, hidden: torch.Tensor | None = None, first: int = 0
    ) -> StepGenerator:
        attention = AttentionBatch.build(batch, self._block_size, self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        hidden = yield from self._walk(token_ids, positions, attention, chosen, hidden, first)
        return hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def _walk(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        chosen: ChosenExperts,
        hidden: torch.Tensor | None = None,
        first: int = 0,
    ) -> StepGenerator:
        """Every stage of every block, or of those from `first` on, where rows are `hidden` [n, h]. Returns
        hidden states [n, h]; chosen: gets each layer's expert ids."""
        if hidden is None:
            hidden = self._model.embed(token_ids)
        for layer, block in enumerate(self._model.blocks[first:], first):
            gated = to_gate(block, layer, hidden, positions, attention, self._kv)
            del hidden  # as in every stage: many rows are megabytes, and go as soon as nothing needs them
            if gated.expert_ids is None:
                hidden = block.merge(gated, block.dense(gated.normed), None)
                continue
            chosen.append(gated.expert_ids)  # in a recording: from now on nothing else is written there
            ask, gated = self._combine.ask(layer, gated)
            yield ask
            held = PendingMerge(block, gated, block.dense(gated.normed))
            del gated, ask
            answer = yield held
            hidden = held.merge(None if answer is None else answer.to(self._device))
            del held, answer
        return hidden

    def _recorded(self, batch: TokenBatch, recorded: _Recorded, chosen: ChosenExperts) -> StepGenerator:
        """A decode step. The first one of its size is recorded."""
        decode = recorded.decodes.get(batch.num_rows)
        try:
            if decode is None:
                hidden = yield from self._record(batch, recorded)
            else:
                hidden = yield from decode.replay(batch)
        except StepDropped:
            self._free.append(recorded)
            raise
        chosen += recorded.decodes[batch.num_rows].chosen
        self._free.append(recorded)  # not where the step broke off: its rows may be asked for once more
        return hidden

    def _record(self, batch: TokenBatch, recorded: _Recorded) -> StepGenerator:
        attention = AttentionBatch.of_decode(batch, self._block_size, self._width)
        inputs = attention.batch
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        chosen: ChosenExperts = []
        stages = self._walk(token_ids, positions, attention, chosen)
        if not self._apart:
            stages = _in_one(RunningStep(self._experts, stages))
        parts: list[Recording[_Item]] = []
        answer: torch.Tensor | None = None
        while True:
            parts.append(recorded.recorder(partial(self._next, stages, answer, batch.num_rows), answer))
            item = parts[-1].result
            if isinstance(item, torch.Tensor):
                where: ChosenExperts = [np.asarray(ids) for ids in chosen]
                recorded.decodes[batch.num_rows] = _Decode(attention, parts, where)
                return item
            answer = yield item

    def _next(self, stages: StepGenerator, answer: torch.Tensor | None, rows: int) -> _Item:
        """The next item of `stages`; with the last one the logits of a single row. For many rows Python
        between the two costs little, and logits take memory."""
        item = _next(stages, answer)
        if rows == 1 and isinstance(item, torch.Tensor):
            self._logits[id(item)] = item, self._model.logits(item)
        return item


def to_gate(
    block: Block,
    layer: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    kv: PagedKV,
) -> Gated:
    """The stages of a block up to its gate; the rows' keys and values are in the cache then."""
    return block.gate(hidden, to_partial(block, layer, hidden, positions, attention, kv))


def to_partial(
    block: Block,
    layer: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    kv: PagedKV,
) -> torch.Tensor:
    """The stages of a block up to its output projection [n, h]: a partial sum where heads are dealt out."""
    rows = block.pre_attention(hidden, positions)
    kv.write(layer, rows.key, rows.value, attention.slots)
    attended = block.attention(rows.query, kv.keys(layer), kv.values(layer), attention)
    del rows
    return block.output_projection(attended)


_Item = ExpertRequest | PendingMerge | torch.Tensor | None
"""What stages yield, or in the end return."""


def _next(stages: StepGenerator, answer: torch.Tensor | None) -> _Item:
    """The next item of `stages`.

    A recording keeps its items for ever, but what one holds matters until the answer is there: then later
    stages may have the memory, as they will in every replay.
    """
    try:
        item = stages.send(answer)
    except StopIteration as end:
        hidden: torch.Tensor = end.value
        return hidden
    return item.each(_borrowed) if isinstance(item, PendingMerge) else item


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which this one does not keep: whoever looks at it knows that it is still there."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype).view(tensor.shape)


def _in_one(walk: RunningStep) -> StepGenerator:
    """A walk that needs to wait for nobody, as stages that ask nothing."""
    yield from ()
    return walk.finish()


@dataclass(frozen=True)
class _Decode:
    """A recorded decode step and the arrays it reads."""

    attention: AttentionBatch
    parts: list[Recording[_Item]]
    """From one question or answer to the next; the last one's result are hidden states."""
    chosen: ChosenExperts
    """[n, k] expert ids, layer after layer."""

    def replay(self, batch: TokenBatch) -> StepGenerator:
        """The same operations on the rows of `batch`."""
        self._fill(batch)
        answer: torch.Tensor | None = None
        for part in self.parts[:-1]:
            item = part.run(answer)
            assert not isinstance(item, torch.Tensor)
            answer = yield item
        hidden = self.parts[-1].run(answer)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def _fill(self, batch: TokenBatch) -> None:
        """Put another step's rows where the recording reads."""
        inputs = self.attention.batch
        np.copyto(inputs.token_ids, batch.token_ids)
        np.copyto(inputs.positions, batch.positions)
        np.copyto(inputs.context_lens, batch.context_lens)
        inputs.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        self.attention.fill_slots()


@dataclass(frozen=True)
class _Recorded:
    """Decode steps, by rows, that share their memory: one runs at a time."""

    recorder: OperationRecorder
    decodes: dict[int, _Decode] = field(default_factory=dict)
