"""A group whose model is larger than its fast memory: each rank pages its own share of the routed experts.

All ranks run the same list of tasks. Everything after attention runs on one lane, in the order of the list,
so the ranks reach their collectives in the same order. Each rank loads from the slow level at its own pace.
So does a CPU that computes attention beside a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.block import Block
from moesaic.models.model import Model
from moesaic.offload.parts import MicroBatch
from moesaic.offload.post_attention import TaskFunction
from moesaic.offload.weights import StreamedExperts
from moesaic.policy.offloading.tasks import Kind, Task
from moesaic.runtime import offloaded_worker
from moesaic.runtime.group.collective_layouts import CollectiveLayout, dense_feed_forward
from moesaic.runtime.group.exchanges import run_at_once
from moesaic.runtime.group.rows import RowCollectives
from moesaic.transport.peers import HALF_BYTES

WHOLE_BLOCKS = ("cgopipe", "s4", "serial")
"""Schedules with gate and experts in one task. The collectives of a group run between the two."""
SLOW_ATTENTION_SCHEDULES = ("s2", "s3")
"""Further schedules, where the slow level has a processor."""


def check(config: WorkerConfig, offload: Offload) -> None:
    """Raises ConfigError for a policy that a group cannot carry out, or experts that cannot be paged."""
    offloaded_worker.check(config)
    size, gpu = config.parallel.tensor_parallel_size, offloaded_worker.is_on_gpu(config.model)
    for name, value, allowed_values in (
        ("--expert-tensor-parallel-size", config.parallel.expert_tensor_parallel_size, (1,)),
        ("--offload-schedule", offload.schedule, WHOLE_BLOCKS + SLOW_ATTENTION_SCHEDULES * gpu),
        ("link", offload.link, (None,)),
        ("slow_attention", offload.slow_attention, (False, True) if gpu else (False,)),
        ("slow_cache", offload.slow_cache, (0, 1) if gpu else (0,)),
    ):
        if value not in allowed_values:
            text = ", ".join(map(str, allowed_values))
            raise ConfigError.field(
                name, value, f"{text} with --fast-memory and --tensor-parallel-size {size}"
            )
    offloaded_worker.paged_layout(config.model)


class PassWeights:
    """The weights of a rank's experts during a pass, by layer."""

    def __init__(self, streamed_experts: StreamedExperts) -> None:
        self._streamed_experts = streamed_experts
        self.turn = 0
        """The turn of the pass's first layer; see Streamed."""

    def __call__(self, layer: int) -> ExpertWeights:
        return self._streamed_experts.experts(self.turn + layer, layer)


class GroupPostAttention:
    """What follows attention in a group. It takes the place of offload.post_attention.LocalPostAttention.

    Rows that do not fit into one round of the transport are sent in several rounds.
    """

    def __init__(
        self,
        model: Model,
        rows: RowCollectives,
        collectives: Callable[[], CollectiveLayout],
        weights: PassWeights,
    ) -> None:
        """collectives: makes a layout. Each piece of a micro-batch gets its own.

        A layout keeps the ranks of its rows from layer to layer.
        """
        self._model, self._rows, self._collectives, self._weights = model, rows, collectives, weights
        self._rows_per_round = rows_of_round(model)
        self._pieces: list[list[tuple[slice, CollectiveLayout]]] = []
        """The pieces of each micro-batch."""
        self.tasks: Mapping[Kind, TaskFunction] = {Kind.POST_WITH_EXPERTS: self._post}

    def begin(self, parts: Sequence[MicroBatch], turn: int, prefill: bool) -> None:
        self._weights.turn = turn
        self._pieces = [self._cut(part) for part in parts]

    def merge(self, layer: int, part: MicroBatch) -> None:
        """Does nothing: the rows are merged already."""

    def _cut(self, part: MicroBatch) -> list[tuple[slice, CollectiveLayout]]:
        ids = part.batch.token_ids
        pieces = [
            (slice(start, start + self._rows_per_round), self._collectives())
            for start in range(0, len(ids), self._rows_per_round)
        ]
        for piece, collectives in pieces:
            collectives.begin(ids[piece])
        return pieces

    def _post(self, task: Task, part: MicroBatch) -> None:
        block, attention_output = self._model.blocks[task.layer], part.attention_output
        assert attention_output is not None
        rows = block.output_projection(attention_output)
        # Freed before the experts are computed, since memory is short here.
        part.attention_output = None
        for piece, collectives in self._pieces[task.micro_batch]:
            rows[piece] = self._feed_forward(collectives, task.layer, block, part.hidden[piece], rows[piece])
        part.hidden = rows

    def _feed_forward(
        self,
        collectives: CollectiveLayout,
        layer: int,
        block: Block,
        hidden: torch.Tensor,
        partial: torch.Tensor,
    ) -> torch.Tensor:
        stages = (
            collectives.feed_forward(layer, block, hidden, partial)
            if block.is_routed
            else dense_feed_forward(self._rows, block, hidden, partial)
        )
        return run_at_once(stages, len(hidden))


def rows_of_round(model: Model) -> int:
    """The rows that one rank can send to the ranks of all their experts in one round.

    The answers fit into one round too. Example: with hidden size 4096 and 2 experts a token it is 2045 rows.
    Each takes two copies (32 KiB) and the metadata of its pairs.
    """
    spec = model.spec
    copy = 4 * (spec.hidden_size + 2 * spec.top_k + 1)
    return max(1, HALF_BYTES // (spec.top_k * copy))
