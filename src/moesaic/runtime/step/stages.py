"""The stages of every block, in order, layer after layer.

Question: Where do rows leave for the experts in a step?
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.moving import move_tensor
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.models.block import Block, GateOutput
from moesaic.models.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.runtime.step.running_step import Combine, PendingMerge, SharedRows, StepGenerator, StepResult
from moesaic.runtime.step.step_kind import Kind

Result = TypeVar("Result")
Exchanges = Generator[SharedRows, torch.Tensor | None, torch.Tensor]
"""The stages of a block up to its output projection, which returns [n, h]. See `SharedRows`."""


class RecordedHeads(Protocol):
    """The part of other processes in a recorded step."""

    def run_unrecorded(
        self, step: Callable[[], Result], answer: torch.Tensor | None = None
    ) -> Recording[Result]:
        """Runs the next part of the step without recording it."""
        ...

    def recorder(self, make: OperationRecorder) -> OperationRecorder:
        """Records the parts that have run unrecorded, in their order."""
        ...

    def begin(self, batch: TokenBatch) -> None:
        """The step that is replayed from now on."""
        ...


class RecordedStages(RecordedHeads, Protocol):
    """The part of other processes, with the stages of this process while the step is recorded."""

    def stages(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> Exchanges:
        """The stages of `SharedHeads.stages`."""
        ...


class SharedHeads(Protocol):
    """Attention over the heads of several processes."""

    def stages(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> Exchanges:
        """The stages up to the output projection, summed over all heads. They yield only in `recording`."""
        ...

    def recording(self, kind: Kind) -> AbstractContextManager[RecordedHeads]:
        """Within it a step is recorded."""
        ...


@dataclass(frozen=True)
class BlockStages:
    """The stages of a model over what its layers keep of the sequences."""

    model: Model
    memory: LayerMemory
    block_size: int
    device: torch.device
    combine: Combine
    shared_heads: SharedHeads | None = None
    """Attention over the heads of several processes. None: all heads are in this one."""

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        hidden: torch.Tensor | None = None,
        layers: range | None = None,
    ) -> StepGenerator:
        """Every stage of the blocks of these layers. Returns the hidden states [n, h] of all rows.

        hidden: [n, h] before the first of them; None: the embeddings of the tokens. layers: None: all but the
        one that predicts the token after the next one.
        """
        if hidden is None:
            hidden = self.model.embed(token_ids)
        expert_ids: list[torch.Tensor] = []
        for layer in range(len(self.model.blocks)) if layers is None else layers:
            block = self.model.block(layer)
            arguments = block, layer, hidden, positions, attention, self.memory
            if self.shared_heads is None:
                attention_output = until_output_projection(*arguments)
            else:
                attention_output = yield from self.shared_heads.stages(*arguments)
            gate_output = block.gate(hidden, attention_output)
            # As in every stage: many rows are megabytes, which go as soon as nothing needs them.
            del hidden, attention_output, arguments
            if gate_output.expert_ids is None:
                hidden = block.merge(gate_output, block.dense(gate_output.normed_rows), None)
                continue
            expert_ids.append(gate_output.expert_ids)  # so a recording never reuses their memory
            request, gate_output = self.combine.request(layer, gate_output)
            yield request
            pending = PendingMerge(block, gate_output, block.dense(gate_output.normed_rows))
            del gate_output, request
            answer = yield pending
            hidden = pending.merge(None if answer is None else move_tensor(answer, self.device))
            del pending, answer
        return StepResult(hidden, expert_ids=expert_ids)

    def predict(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        hidden: torch.Tensor,
    ) -> StepGenerator:
        """Every stage of the layer that predicts the token after the next one.

        hidden: [n, h] of these rows after the last block. token_ids: [n] the token after each row.
        """
        layer = len(self.model.blocks)
        prediction_input = self.model.enter_prediction(hidden, token_ids)
        return (
            yield from self.run(token_ids, positions, attention, prediction_input, range(layer, layer + 1))
        )


def until_gate(
    block: Block,
    layer: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    memory: LayerMemory,
) -> GateOutput:
    """The stages of a block up to its gate. Afterwards `memory` has what the layer keeps of the rows."""
    return block.gate(hidden, until_output_projection(block, layer, hidden, positions, attention, memory))


def until_output_projection(
    block: Block,
    layer: int,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    memory: LayerMemory,
) -> torch.Tensor:
    """The stages of a block up to its output projection [n, h]: a partial sum where ranks share the heads."""
    rows = block.pre_attention(hidden, positions)
    attention_output = memory.attend(layer, block, rows, attention)
    del rows
    return block.output_projection(attention_output)
