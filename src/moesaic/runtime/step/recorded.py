"""Decode steps that are recorded once and replayed afterwards, without Python between their operations."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import ExpertRequest
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.running_step import (
    PendingMerge,
    RunningStep,
    StepDropped,
    StepGenerator,
    StepResult,
)

RECORDED_ROWS = 64
"""Decode steps of more rows are not recorded: Python's share of their time is small."""
RECORDED_CHECKS = 32
"""The same for steps with drafted tokens. There is a recording for each number of rows and sequences."""


class RecordedRunner:
    """Replays decode steps and runs every other step operation by operation.

    A recording holds only native operations of this process. Where a direct call answers the experts, one
    recording is the whole step. Otherwise a recording ends at each request and at each merge.
    """

    def __init__(
        self,
        eager: EagerRunner,
        make_recorder: Callable[[], OperationRecorder],
        table_width: int,
        direct: bool,
    ) -> None:
        """table_width: KV blocks of the longest sequence. direct: whether the experts answer at once."""
        self._eager = eager
        self._make_recorder = make_recorder
        self._table_width = table_width
        self._direct = direct
        self._free = [_SharedMemory(make_recorder())]
        """Recordings that no step under way uses: two steps must not share memory."""

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Begin a step. The first decode step of each number of rows and sequences is recorded.

        A decode step is one whose rows all give logits: those of next tokens, and of drafted ones.
        """
        rows = batch.num_rows
        most = RECORDED_ROWS if rows == batch.num_sequences else RECORDED_CHECKS
        if not (0 < rows == len(batch.logit_rows) and rows <= most):
            return self._eager.begin(batch)
        memory = self._free.pop() if self._free else _SharedMemory(self._make_recorder())
        return RunningStep(self._eager.experts, self._decode(batch, memory))

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """See `SegmentRunner`. These steps are not recorded."""
        return self._eager.begin_at_segment(segment, batch, hidden)

    def _decode(self, batch: TokenBatch, memory: _SharedMemory) -> StepGenerator:
        recorded = memory.steps.get((batch.num_rows, batch.num_sequences))
        try:
            if recorded is None:
                result = yield from self._record(batch, memory)
            else:
                result = yield from recorded.replay(batch)
        except StepDropped:
            self._free.append(memory)
            raise
        self._free.append(memory)  # not after another error: its rows may be sent once more
        return result

    def _record(self, batch: TokenBatch, memory: _SharedMemory) -> StepGenerator:
        attention = AttentionBatch.copied(batch, self._eager.stages.block_size, self._table_width)
        inputs = attention.batch
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        generator = self._eager.stages.run(token_ids, positions, attention)
        if self._direct:
            generator = _uninterrupted(RunningStep(self._eager.experts, generator))
        parts: list[Recording[_Item]] = []
        answer: torch.Tensor | None = None
        while True:
            parts.append(memory.recorder(partial(self._next, generator, answer, batch.num_rows), answer))
            item = parts[-1].result
            if isinstance(item, StepResult):
                result = replace(item, expert_ids=[np.asarray(ids) for ids in item.expert_ids])
                memory.steps[batch.num_rows, batch.num_sequences] = _RecordedStep(attention, parts, result)
                return result
            answer = yield item

    def _next(self, generator: StepGenerator, answer: torch.Tensor | None, rows: int) -> _Item:
        """The next item of `generator`. The result of a single row comes with its logits.

        With many rows, Python before the logits costs little and recorded logits take memory.
        """
        item = _next_item(generator, answer)
        if rows == 1 and isinstance(item, StepResult):
            return replace(item, logits=self._eager.stages.model.logits(item.hidden))
        return item


_Item = ExpertRequest | PendingMerge | StepResult | None
"""What a StepGenerator yields or returns."""


def _next_item(generator: StepGenerator, answer: torch.Tensor | None) -> _Item:
    """The next item of `generator`.

    A recording keeps its items for ever, but the tensors of a merge are needed only until the answer is
    there. Later stages may use their memory then, as they do in every replay. So the item does not own them.
    """
    try:
        item = generator.send(answer)
    except StopIteration as end:
        result: StepResult = end.value
        return result
    return item.map(_borrowed) if isinstance(item, PendingMerge) else item


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep the memory alive."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype).view(tensor.shape)


def _uninterrupted(step: RunningStep) -> StepGenerator:
    """A whole step, whose experts answer at once, as a generator that yields nothing."""
    yield from ()
    return step.finish()


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded decode step and the arrays that it reads."""

    attention: AttentionBatch
    parts: list[Recording[_Item]]
    """Each part ends at a request, at a merge, or at the end of the step."""
    result: StepResult
    """Of every replay: its tensors are views of the memory that the recording writes."""

    def replay(self, batch: TokenBatch) -> StepGenerator:
        """The same operations on the rows of `batch`."""
        self._fill(batch)
        answer: torch.Tensor | None = None
        for part in self.parts[:-1]:
            item = part.run(answer)
            assert not isinstance(item, StepResult)
            answer = yield item
        self.parts[-1].run(answer)
        return self.result

    def _fill(self, batch: TokenBatch) -> None:
        """Copy the inputs of another step to where the recording reads them."""
        inputs = self.attention.batch
        np.copyto(inputs.token_ids, batch.token_ids)
        np.copyto(inputs.positions, batch.positions)
        np.copyto(inputs.query_starts, batch.query_starts)
        np.copyto(inputs.context_lens, batch.context_lens)
        np.copyto(inputs.states, batch.states)
        inputs.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        self.attention.fill_slots()


@dataclass(frozen=True)
class _SharedMemory:
    """Recorded steps that share their memory, so that one of them runs at a time."""

    recorder: OperationRecorder
    steps: dict[tuple[int, int], _RecordedStep] = field(default_factory=dict)
    """By numbers of rows and of sequences."""
