"""Decode steps that are recorded once and replayed afterwards, without Python between their operations.

Question: How are decode steps recorded on a CPU?
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Recording
from moesaic.runtime.step.recordings import Item, RecordingRunner, SharedMemory, next_item
from moesaic.runtime.step.running_step import PendingMerge, StepGenerator, StepResult

RECORDED_ROWS = 64
"""Decode steps of more rows are not recorded: Python's share of their time is small."""
RECORDED_CHECKS = 32
"""The same for steps with drafted tokens. There is a recording for each number of rows and sequences."""


class RecordedRunner(RecordingRunner["_RecordedStep"]):
    """Replays decode steps and runs every other step operation by operation.

    A recording holds only native operations.
    """

    def _is_recorded(self, batch: TokenBatch) -> bool:
        """A decode step is one whose rows all give logits: those of next tokens, and of drafted ones."""
        rows = batch.num_rows
        max_rows = RECORDED_ROWS if rows == batch.num_sequences else RECORDED_CHECKS
        return 0 < rows == len(batch.logit_rows) and rows <= max_rows

    def _run(self, batch: TokenBatch, memory: SharedMemory[_RecordedStep]) -> StepGenerator:
        """There is a recording for each number of rows and sequences."""
        recorded_step = memory.steps.get((batch.num_rows, batch.num_sequences))
        return self._record(batch, memory) if recorded_step is None else recorded_step.replay(batch)

    def _record(self, batch: TokenBatch, memory: SharedMemory[_RecordedStep]) -> StepGenerator:
        attention = AttentionBatch.build_reusable(batch, self._eager.stages.block_size, self._table_width)
        inputs = attention.batch
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        generator = self._wrap_stages(self._eager.stages.run(token_ids, positions, attention))
        parts: list[Recording[Item]] = []
        answer: torch.Tensor | None = None
        while True:
            parts.append(memory.recorder(partial(self._next, generator, answer, batch.num_rows), answer))
            item = parts[-1].result
            if isinstance(item, StepResult):
                result = replace(item, expert_ids=[np.asarray(ids) for ids in item.expert_ids])
                memory.steps[batch.num_rows, batch.num_sequences] = _RecordedStep(attention, parts, result)
                return result
            answer = yield item

    def _next(self, generator: StepGenerator, answer: torch.Tensor | None, rows: int) -> Item:
        """The next item of `generator`. The result of a single row comes with its logits.

        With many rows, Python before the logits costs little and recorded logits take memory.
        """
        item = _borrowing_item(generator, answer)
        if rows == 1 and isinstance(item, StepResult):
            return replace(item, logits=self._eager.stages.model.logits(item.hidden))
        return item


def _borrowing_item(generator: StepGenerator, answer: torch.Tensor | None) -> Item:
    """The next item of `generator`.

    A recording keeps its items for ever, but the tensors of a merge are needed only until the answer is
    there. Later stages may use their memory then, as they do in every replay. So the item does not own them.
    """
    item = next_item(generator, answer)
    return item.map(_borrow) if isinstance(item, PendingMerge) else item


def _borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep the memory alive."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded decode step and the arrays that it reads."""

    attention: AttentionBatch
    parts: list[Recording[Item]]
    """Each part ends at a request, at a merge, or at the end of the step."""
    result: StepResult
    """The result of every replay. Its tensors are views of the memory that the recording writes."""

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
