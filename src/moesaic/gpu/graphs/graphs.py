"""Decode steps on a GPU that are recorded as CUDA graphs, one for each bucket of rows.

A step of fewer rows than its bucket has is padded. A padded row has no context, no cache slot and no seat, so
it reads and writes nothing that another row sees. A recording is made with padded rows alone. The same
launches run once before it, to compile and allocate what a recording must not.

A row of drafted tokens is replayed as a sequence of one row: its context ends with itself, and the rows
before it are in the cache when attention reads that. Layers that keep states take the rows of a sequence one
after another. So a model with such layers has another recording of each bucket for steps with drafted tokens.
It has as many sequences as rows. Padded ones have no rows and no seat.

After a decode step the layer that drafts tokens is replayed too, if the model has one. Its rows are those of
the step that count, in a bucket of their own.

Where the experts are in this process, one graph is the whole step. Otherwise a graph ends at each request and
at each merge, as the parts of `recorded_runner.py` do. Where other processes share the attention, they
record and replay their parts of it together with this one.

Question: How are decode steps recorded on a GPU (CUDA graphs)?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import ExpertRequest
from moesaic.gpu.graphs.graph_inputs import GraphInputs, is_recorded, run_eagerly
from moesaic.kernels.moving import move_array, pin_tensor
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.runtime.step.recordings import Item, RecordingRunner, SharedMemory, next_item
from moesaic.runtime.step.running_step import (
    PendingMerge,
    RunningStep,
    SharedRows,
    StepGenerator,
    StepResult,
)
from moesaic.runtime.step.stages import RecordedHeads
from moesaic.runtime.step.step_kind import Kind


class GraphRunner(RecordingRunner["_RecordedStep"]):
    """Replays decode steps and runs every other step operation by operation."""

    def _is_recorded(self, batch: TokenBatch) -> bool:
        return is_recorded(batch)

    def _run(self, batch: TokenBatch, memory: SharedMemory[_RecordedStep]) -> StepGenerator:
        """There is a recording for each kind of step."""
        kind = Kind.from_batch(batch, self._eager.stages.model.spec)
        if kind not in memory.steps:
            memory.steps[kind] = self._record(kind, memory.recorder)
        return memory.steps[kind].replay(batch)

    def begin_prediction(self, batch: TokenBatch, hidden: torch.Tensor, rows: IntArray) -> RunningStep:
        """Begin a recorded step of the layer that drafts tokens."""
        memory, spec = self._take_memory(), self._eager.stages.model.spec
        kind = Kind.from_batch(batch, spec)._replace(
            has_sequences_of_several_rows=False
        )  # that layer keeps no states
        key = (*kind, spec.num_layers)
        if key not in memory.steps:
            memory.steps[key] = self._record_prediction(kind, memory.recorder)
        step = memory.steps[key]
        step.go_on_from(hidden, rows)
        return self._running(partial(step.replay, batch), memory)

    def _record(self, kind: Kind, recorder: OperationRecorder) -> _RecordedStep:
        """A recording of padded rows. The same launches ran once before it."""
        stages, inputs = self._eager.stages, self._inputs(kind)
        run = partial(stages.run, inputs.token_ids, inputs.positions, inputs.attention)
        return _RecordedStep(inputs, *self._make_parts(run, kind, recorder))

    def _record_prediction(self, kind: Kind, recorder: OperationRecorder) -> _RecordedStep:
        """Makes a recording, as `_record`, of the layer that predicts the token after the next one."""
        stages, inputs = self._eager.stages, self._inputs(kind)
        hidden = torch.zeros(kind.rows, stages.model.spec.hidden_size, device=stages.device)
        run = partial(stages.predict, inputs.token_ids, inputs.positions, inputs.attention, hidden)
        return _RecordedStep(inputs, *self._make_parts(run, kind, recorder), hidden)

    def _inputs(self, kind: Kind) -> GraphInputs:
        stages = self._eager.stages
        return GraphInputs(kind, self._table_width, stages.block_size, stages.device)

    def _make_parts(
        self, run: Callable[[], StepGenerator], kind: Kind, recorder: OperationRecorder
    ) -> tuple[list[Recording[Item]], RecordedHeads | None]:
        """The parts of a step and of other processes. Its launches run once before they are recorded."""
        stages = self._eager.stages
        spec, shared_heads = stages.model.spec, stages.shared_heads
        answers = torch.zeros(kind.rows, max(1, spec.top_k), spec.hidden_size, device=stages.device)
        if shared_heads is None:
            _record_parts(self._wrap_stages(run()), answers, run_eagerly)
            return _record_parts(self._wrap_stages(run()), answers, recorder), None
        with shared_heads.recording(kind) as recorded_heads:
            _record_parts(self._wrap_stages(run()), answers, recorded_heads.run_unrecorded)
            return _record_parts(
                self._wrap_stages(run()), answers, recorded_heads.recorder(recorder)
            ), recorded_heads


def _record_parts(
    generator: StepGenerator, answers: torch.Tensor, make: Callable[..., Recording[Item]]
) -> list[Recording[Item]]:
    """A step, made part by part. answers: [n, k, h] in place of what experts answer."""
    parts: list[Recording[Item]] = []
    answer: torch.Tensor | None = None
    exchange_answers: dict[tuple[int, ...], torch.Tensor] = {}
    while True:
        parts.append(make(partial(next_item, generator, answer), answer))
        item = parts[-1].result
        if isinstance(item, StepResult):
            return parts
        answer = answers if isinstance(item, PendingMerge) else None
        if isinstance(item, SharedRows) and item.shape is not None:
            if item.shape not in exchange_answers:
                exchange_answers[item.shape] = torch.zeros(item.shape, device=answers.device)
            answer = exchange_answers[item.shape]


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded decode step and the arrays that it reads."""

    inputs: GraphInputs
    parts: list[Recording[Item]]
    """Each part ends at a request, at a merge, at an exchange of rows, or at the end of the step."""
    recorded_heads: RecordedHeads | None = None
    """The part of other processes."""
    hidden: torch.Tensor | None = None
    """[rows, h] the hidden states that it goes on from, if it is of the layer that drafts tokens."""

    def go_on_from(self, hidden: torch.Tensor, rows: IntArray) -> None:
        """Copy these rows of hidden [n, h] to where the recording reads them."""
        assert self.hidden is not None
        next_hidden = hidden if len(rows) == len(hidden) else hidden[move_array(rows, hidden.device)]
        self.hidden[: len(rows)].copy_(next_hidden)

    def replay(self, batch: TokenBatch) -> StepGenerator:
        """The same launches on the rows of `batch`, whose results come without those of padded rows."""
        self.inputs.fill(batch)
        if self.recorded_heads is not None:
            self.recorded_heads.begin(batch)
        rows, device = batch.num_rows, self.inputs.token_ids.device
        logit_rows = None if len(batch.logit_rows) == rows else move_array(batch.logit_rows, device)
        answer: torch.Tensor | None = None
        for part in self.parts[:-1]:
            item = part.run(_sendable(answer))
            assert not isinstance(item, StepResult)
            answer = item.run(rows) if isinstance(item, SharedRows) else (yield _cut(item, rows))
        result = self.parts[-1].run(_sendable(answer))
        assert isinstance(result, StepResult)
        ids = [torch.as_tensor(layer_ids)[:rows] for layer_ids in result.expert_ids]
        hidden = result.hidden[:rows] if logit_rows is None else result.hidden[logit_rows]
        return StepResult(hidden, None, ids)


def _sendable(answer: torch.Tensor | None) -> torch.Tensor | None:
    return pin_tensor(answer) if answer is not None and answer.device.type == "cpu" else answer


def _cut(item: ExpertRequest | PendingMerge | None, rows: int) -> ExpertRequest | PendingMerge | None:
    """The item without padded rows."""
    if isinstance(item, PendingMerge):
        return item.map(lambda array: array[:rows])
    if item is None:
        return None
    weights = None if item.weights is None else item.weights[:rows]
    return ExpertRequest(item.layer, item.hidden[:rows], item.expert_ids[:rows], weights)
