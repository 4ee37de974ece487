"""What a block does after its attention: output projection, gate, shared and routed experts, merge."""

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
from moesaic.offload.parts import Part
from moesaic.policy.offloading.tasks import Kind, Lane, Task

Do = Callable[[Task, Part], None]


class AfterAttention(Protocol):
    """Carries out the tasks of these stages; `tasks` names their kinds, POST always among them."""

    @property
    def tasks(self) -> Mapping[Kind, Do]: ...

    def begin(self, parts: Sequence[Part], turn: int, prefill: bool) -> None:
        """The next pass. turn: of its first layer, counted over all passes."""
        ...

    def merge(self, layer: int, part: Part) -> None:
        """What is left of a layer whose experts have answered."""
        ...


class FastExperts(Protocol):
    """The routed experts on the fast level; offload.weights has them."""

    def experts(self, count: int, layer: int) -> ExpertWeights: ...


@dataclass(frozen=True)
class SlowExperts:
    """Routed experts on the slow level, and the kernels of the processor there."""

    weights: Mapping[int, ExpertWeights]
    """By layer."""
    kernels: Kernels


class LocalAfterAttention:
    """The stages in one process. Gate and experts may be tasks of their own, experts on both levels too."""

    def __init__(
        self,
        model: Model,
        experts: FastExperts,
        static: Mapping[int, frozenset[int]],
        down: Link,
        up: Link,
        slow: SlowExperts | None = None,
    ) -> None:
        """static: layer -> experts that are always on the fast level. slow: those that the slow processor
        computes; None: it has none."""
        self._model = model
        self._experts = experts
        self._static = static
        self._down, self._up = down, up
        self._slow = slow or SlowExperts({}, model.kernels)
        self._turn, self._prefill = 0, False
        self._memory, self._lent = torch.empty(0), False
        """Of the answers of one micro-batch."""
        self.tasks: Mapping[Kind, Do] = {
            Kind.POST: self._post,
            Kind.GATE: self._gate,
            Kind.EXPERTS: self._compute,
            Kind.SAVE_ROWS: self._send_rows,
            Kind.LOAD_ANSWERS: self._take_answers,
        }

    def begin(self, parts: Sequence[Part], turn: int, prefill: bool) -> None:
        self._turn, self._prefill, self._lent = turn, prefill, False

    def merge(self, layer: int, part: Part) -> None:
        if part.gated is not None:
            part.hidden = self._model.blocks[layer].merge(part.gated, part.dense, part.answers)
            if part.answers is not None and part.answers.data_ptr() == self._memory.data_ptr():
                self._lent = False
            part.gated = part.dense = part.answers = part.away = part.chosen = None

    def _post(self, task: Task, part: Part) -> None:
        self._gate(task, part)
        self._all_experts(task.layer, part)

    def _gate(self, task: Task, part: Part) -> None:
        block, attended = self._model.blocks[task.layer], part.attended
        assert attended is not None
        part.gated = block.gate(part.hidden, block.output_projection(attended))
        part.attended = None
        part.dense = block.dense(part.gated.normed)
        if part.gated.expert_ids is not None and task.layer in self._slow.weights and not self._prefill:
            here = sorted(self._static[task.layer])
            part.chosen = part.gated.expert_ids.cpu()
            part.away = np.flatnonzero(~np.isin(part.chosen.numpy(), here))
            part.answers = self._answers(part)

    def _answers(self, part: Part) -> torch.Tensor:
        """[n, k, h] to be filled. It is the largest there is between a layer's operations: one serves all
        micro-batches, unless several are between gate and merge at once."""
        assert part.gated is not None and part.gated.expert_ids is not None
        shape = (*part.gated.expert_ids.shape, part.hidden.shape[1])
        if self._lent:
            return part.hidden.new_empty(shape)
        self._lent, size = True, math.prod(shape)
        if len(self._memory) < size:
            self._memory = torch.empty(0)  # before there is more
            self._memory = part.hidden.new_empty(size)
        return self._memory[:size].view(shape)

    def _all_experts(self, layer: int, part: Part) -> None:
        """And what they make of the rows: the answers of one micro-batch alone are in memory."""
        assert part.gated is not None
        if part.gated.expert_ids is not None:
            weights = self._experts.experts(self._turn + layer, layer)
            part.answers = self._answers(part)
            kernel = self._model.kernels.experts
            kernel(weights, part.gated.normed, part.gated.expert_ids, part.answers)
        self.merge(layer, part)

    # ---- experts on both levels

    def _compute(self, task: Task, part: Part) -> None:
        """The experts of one level: with in-place those that it holds, else all of them on the fast one."""
        if part.away is None:
            if task.lane is Lane.FAST:
                self._all_experts(task.layer, part)
        elif task.lane is Lane.SLOW:
            assert part.sent is not None and part.chosen is not None
            weights, kernels = self._slow.weights[task.layer], self._slow.kernels
            part.sent = _pairs(kernels, weights, part.chosen, part.sent, part.away)
        else:
            assert part.gated is not None and part.answers is not None and part.gated.expert_ids is not None
            here = np.setdiff1d(np.arange(part.answers.shape[0] * part.answers.shape[1]), part.away)
            weights = self._experts.experts(self._turn + task.layer, task.layer)
            ids, kernels = part.gated.expert_ids, self._model.kernels
            answers = _pairs(kernels, weights, ids, part.gated.normed, here)
            part.answers.view(-1, answers.shape[1])[torch.from_numpy(here)] = answers

    def _send_rows(self, task: Task, part: Part) -> None:
        if part.away is not None:
            assert part.gated is not None
            part.sent = self._up.copy(part.gated.normed)

    def _take_answers(self, task: Task, part: Part) -> None:
        if part.away is not None:
            assert part.sent is not None and part.answers is not None
            answers = self._down.copy(part.sent)
            part.answers.view(-1, answers.shape[1])[torch.from_numpy(part.away)] = answers
            part.sent = None


def _pairs(
    kernels: Kernels, weights: ExpertWeights, ids: torch.Tensor, rows: torch.Tensor, pairs: IntArray
) -> torch.Tensor:
    """[p, h] answers to some pairs. A row's bits do not depend on what else is computed with it."""
    chosen = torch.from_numpy(pairs)
    rows = rows[chosen // ids.shape[1]]
    return kernels.experts(weights, rows, ids.view(-1)[chosen][:, None])[:, 0]
