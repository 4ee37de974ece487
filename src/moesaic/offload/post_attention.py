"""The stages of a block after its attention: output projection, gate, shared and routed experts, merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.model import Model
from moesaic.offload.link import Link
from moesaic.offload.parts import MicroBatch
from moesaic.policy.offloading.tasks import Kind, Lane, Task

TaskFunction = Callable[[Task, MicroBatch], None]
Learn = Callable[[int, torch.Tensor, float], None]
"""Gets a layer, the expert ids [n, k] of rows, and the steps in which one row of each sequence makes them."""


def learn_nothing(layer: int, expert_ids: torch.Tensor, steps: float) -> None:
    """Does nothing, where no choice is counted."""


class PostAttention(Protocol):
    """Runs the stages after attention.

    `tasks` has the task kinds that it handles. POST_WITH_EXPERTS is always one.
    """

    @property
    def tasks(self) -> Mapping[Kind, TaskFunction]: ...

    def begin(self, parts: Sequence[MicroBatch], turn: int, prefill: bool) -> None:
        """Starts the next pass. turn: number of the pass's first layer, counted over all passes."""
        ...

    def merge(self, layer: int, part: MicroBatch) -> None:
        """Adds the expert outputs to the hidden states, once a layer's experts have computed them."""
        ...


class FastExperts(Protocol):
    """Provides the routed experts on the fast level; implemented in offload.weights."""

    def experts(self, count: int, layer: int) -> ExpertWeights: ...


@dataclass(frozen=True)
class SlowExperts:
    """Routed experts on the slow level, and the kernels of the slow processor."""

    weights: Mapping[int, ExpertWeights]
    """Layer -> its experts."""
    kernels: Kernels
    by_price: bool = False
    """True: who computes an expert is decided when all gates of the layer have run, by `divide`. False: the
    slow processor computes all experts that are not on the fast level."""


class LocalPostAttention:
    """The stages in one process.

    Gate and experts may be separate tasks, and experts may be on both levels.
    """

    def __init__(
        self,
        model: Model,
        experts: FastExperts,
        static: Mapping[int, frozenset[int]],
        load_link: Link,
        save_link: Link,
        slow: SlowExperts | None = None,
        learn: Learn = learn_nothing,
    ) -> None:
        """static: layer -> experts that are always on the fast level. slow: experts that the slow processor
        computes; None means that it computes none. learn: gets the choices of gates whose experts are
        computed in the same task. The others are learned when their experts are loaded."""
        self._model = model
        self._experts = experts
        self._static = static
        self._load_link, self._save_link = load_link, save_link
        self._slow = slow or SlowExperts({}, model.kernels)
        self._first_layer_turn, self._prefill, self._num_parts = 0, False, 1
        self._learn = learn
        self._memory, self._is_memory_lent = torch.empty(0), False
        """Memory for one micro-batch's expert outputs, and whether a micro-batch is using it."""
        self.tasks: Mapping[Kind, TaskFunction] = {
            Kind.POST_WITH_EXPERTS: self._post,
            Kind.POST_WITHOUT_EXPERTS: self._gate,
            Kind.EXPERTS: self._compute,
            Kind.SAVE_ROWS: self._send_rows,
            Kind.LOAD_ANSWERS: self._take_answers,
        }

    def begin(self, parts: Sequence[MicroBatch], turn: int, prefill: bool) -> None:
        self._first_layer_turn, self._prefill, self._is_memory_lent = turn, prefill, False
        self._num_parts = len(parts)

    def merge(self, layer: int, part: MicroBatch) -> None:
        if part.gate_output is not None:
            part.hidden = self._model.blocks[layer].merge(part.gate_output, part.dense, part.answers)
            if part.answers is not None and part.answers.data_ptr() == self._memory.data_ptr():
                self._is_memory_lent = False
            part.gate_output = part.dense = part.answers = part.slow_pairs = part.slow_expert_ids = None

    def _post(self, task: Task, part: MicroBatch) -> None:
        self._gate(task, part)
        assert part.gate_output is not None
        if part.gate_output.expert_ids is not None:
            steps = part.batch.num_rows / part.batch.num_sequences / self._num_parts
            self._learn(task.layer, part.gate_output.expert_ids, steps)
        self._all_experts(task.layer, part)

    def _gate(self, task: Task, part: MicroBatch) -> None:
        block, attention_output = self._model.blocks[task.layer], part.attention_output
        assert attention_output is not None
        part.gate_output = block.gate(part.hidden, block.output_projection(attention_output))
        part.attention_output = None
        part.dense = block.dense(part.gate_output.normed_rows)
        is_divided = task.layer in self._slow.weights and not self._slow.by_price and not self._prefill
        if part.gate_output.expert_ids is not None and is_divided:
            self.divide(part, part.gate_output.expert_ids.cpu(), sorted(self._static[task.layer]))

    def divide(self, part: MicroBatch, expert_ids: torch.Tensor, fast_experts: Sequence[int]) -> None:
        """Leave the pairs of other experts than `fast_experts` to the slow processor. expert_ids: [n, k] on
        the CPU."""
        part.slow_expert_ids = expert_ids
        part.slow_pairs = np.flatnonzero(~np.isin(expert_ids.numpy(), fast_experts))
        part.answers = self._answers(part)

    def _answers(self, part: MicroBatch) -> torch.Tensor:
        """Returns [n, k, h] memory for expert outputs, the largest tensor that lives between a layer's tasks.

        All micro-batches share one such tensor, unless several are between gate and merge at the same time.
        """
        assert part.gate_output is not None and part.gate_output.expert_ids is not None
        shape = (*part.gate_output.expert_ids.shape, part.hidden.shape[1])
        if self._is_memory_lent:
            return part.hidden.new_empty(shape)
        self._is_memory_lent, size = True, math.prod(shape)
        if len(self._memory) < size:
            self._memory = torch.empty(0)  # free the old memory before allocating more
            self._memory = part.hidden.new_empty(size)
        return self._memory[:size].view(shape)

    def _all_experts(self, layer: int, part: MicroBatch) -> None:
        """Computes all experts and merges their outputs, so that only one micro-batch's outputs exist."""
        assert part.gate_output is not None
        if part.gate_output.expert_ids is not None:
            weights = self._experts.experts(self._first_layer_turn + layer, layer)
            part.answers = self._answers(part)
            kernel = self._model.kernels.experts
            kernel(weights, part.gate_output.normed_rows, part.gate_output.expert_ids, part.answers)
        self.merge(layer, part)

    # ---- experts on both levels

    def _compute(self, task: Task, part: MicroBatch) -> None:
        """Computes the experts of one level.

        With in-place execution each level computes the experts that it stores, and with split also those
        that were loaded. Otherwise the fast level computes all of them. Kernels that read a page table leave
        out what is not there, so nothing is gathered for them.
        """
        if part.slow_pairs is None:
            if task.lane is Lane.FAST:
                self._all_experts(task.layer, part)
        elif task.lane is Lane.SLOW:
            assert part.slow_rows is not None and part.slow_expert_ids is not None
            weights, kernels = self._slow.weights[task.layer], self._slow.kernels
            part.slow_rows = _pairs(kernels, weights, part.slow_expert_ids, part.slow_rows, part.slow_pairs)
        else:
            assert (
                part.gate_output is not None
                and part.answers is not None
                and part.gate_output.expert_ids is not None
            )
            weights = self._experts.experts(self._first_layer_turn + task.layer, task.layer)
            ids, kernels = part.gate_output.expert_ids, self._model.kernels
            # The page table has what is on the device. The rows of other pairs come from the slow level.
            if kernels.can_skip_absent and weights.page_table is not None:
                kernels.experts(weights, part.gate_output.normed_rows, ids, part.answers)
                return
            fast_pairs = np.setdiff1d(
                np.arange(part.answers.shape[0] * part.answers.shape[1]), part.slow_pairs
            )
            answers = _pairs(kernels, weights, ids, part.gate_output.normed_rows, fast_pairs)
            part.answers.view(-1, answers.shape[1])[torch.from_numpy(fast_pairs)] = answers

    def _send_rows(self, task: Task, part: MicroBatch) -> None:
        if part.slow_pairs is not None:
            assert part.gate_output is not None
            part.slow_rows = self._save_link.copy(part.gate_output.normed_rows)

    def _take_answers(self, task: Task, part: MicroBatch) -> None:
        if part.slow_pairs is not None:
            assert part.slow_rows is not None and part.answers is not None
            answers = self._load_link.copy(part.slow_rows)
            part.answers.view(-1, answers.shape[1])[torch.from_numpy(part.slow_pairs)] = answers
            part.slow_rows = None


def _pairs(
    kernels: Kernels, weights: ExpertWeights, ids: torch.Tensor, rows: torch.Tensor, pairs: IntArray
) -> torch.Tensor:
    """Returns [p, h] outputs of some (row, expert) pairs. A row's bits do not depend on the other pairs."""
    pair_indices = torch.from_numpy(pairs)
    rows = rows[pair_indices // ids.shape[1]]
    return kernels.experts(weights, rows, ids.view(-1)[pair_indices][:, None])[:, 0]
