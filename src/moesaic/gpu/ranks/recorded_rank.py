"""Decode steps of a rank that are recorded as CUDA graphs, in the same buckets on all ranks.

With `--collectives-backend nccl` the collectives of rows are part of the graphs. With
`--moe-collectives all-reduce` there is nothing else, so a step is one graph. In the other forms a graph ends
where rows go to the experts that the gate has chosen, and with `host` at each exchange. The experts are then
computed between two graphs.

NCCL wants all ranks to record and to replay the same exchanges in the same order. So whether a step is
recorded, and in which bucket, follows from nothing but the step that the first rank announces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.collectives.group import Traffic
from moesaic.gpu.graphs.graph_inputs import GraphInputs, is_recorded, run_eagerly
from moesaic.kernels.moving import move_array
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.runtime.group.exchanges import Exchange, Stages, between_graphs, next_item
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.group.sharded_model import ShardedModel
from moesaic.runtime.step.step_kind import Kind

Item = Exchange | torch.Tensor
"""What ends a graph: an exchange that it cannot hold, or the hidden states at the end of the step."""


class RecordedRank:
    """Replays the decode steps of a rank, and runs all others operation by operation."""

    def __init__(self, model: ShardedModel, recorder: OperationRecorder, table_width: int) -> None:
        """table_width: KV blocks of the longest sequence."""
        self._model, self._recorder, self._table_width = model, recorder, table_width
        self._recorded_rows = model.collectives.recorded_rows
        self._steps: dict[tuple[Kind, bool], _RecordedStep] = {}
        """Recordings by kind, and whether it is of the layer that drafts tokens. One step runs at a time, so
        they share their memory."""
        self._was_replay = False
        """Whether the last step was a replay, so that the layer that goes on from it is one too."""
        self._recordings: list[Recording[Item]] = []
        """The parts of all steps, and of one that could not be recorded to its end."""
        model.rows.when_closing(self.free)

    def run(self, batch: TokenBatch) -> torch.Tensor:
        """Replay the recording of a decode step, or run any other step."""
        self._was_replay = batch.num_rows <= self._recorded_rows.max_rows and is_recorded(batch)
        if not self._was_replay:
            return self._model.run(batch)
        kind = Kind.from_batch(batch, self._model.model.spec, self._recorded_rows.multiple)
        if (kind, False) not in self._steps:
            self._steps[kind, False] = self._record(kind)
        self._model.collectives.begin(batch.token_ids)
        hidden = self._steps[kind, False].replay(batch, self._model.rows)
        self._model.keep_rows(hidden)
        return hidden

    def predict(self, batch: TokenBatch, rows: IntArray) -> torch.Tensor:
        """Compute drafted tokens of these rows. This is a replay after a step that was one."""
        model = self._model
        if not self._was_replay:
            return model.predict(batch, rows)
        kept_hidden = model.select_kept_rows(rows)
        kind = Kind.from_batch(batch, model.model.spec, self._recorded_rows.multiple)
        kind = kind._replace(has_sequences_of_several_rows=False)  # that layer keeps no states
        if (kind, True) not in self._steps:
            self._steps[kind, True] = self._record_prediction(kind)
        step = self._steps[kind, True]
        assert step.hidden is not None
        step.hidden[: len(rows)].copy_(kept_hidden)
        model.collectives.begin(batch.token_ids)
        return step.replay(batch, model.rows)[move_array(batch.logit_rows, model.device)]

    def free(self) -> None:
        """Destroy all recordings."""
        recordings, self._recordings, self._steps = self._recordings, [], {}
        for part in recordings:
            part.free()

    def _record(self, kind: Kind) -> _RecordedStep:
        """A recording of padded rows, in which all ranks take part. The same launches ran once before it."""
        model = self._model
        inputs = GraphInputs(kind, self._table_width, model.block_size, model.device)
        arguments = inputs.token_ids, inputs.positions, inputs.attention
        placeholder_ids = np.zeros(kind.rows, np.int64)  # what needs them is done between graphs
        parts, traffic = self._record_after_run(partial(model.stages, *arguments, placeholder_ids), kind.rows)
        return _RecordedStep(inputs, parts, traffic)

    def _record_prediction(self, kind: Kind) -> _RecordedStep:
        """Make a recording, as `_record`, of the layer that drafts tokens."""
        model = self._model
        inputs = GraphInputs(kind, self._table_width, model.block_size, model.device)
        hidden = torch.zeros(kind.rows, model.model.spec.hidden_size, device=model.device)
        arguments = inputs.token_ids, inputs.positions, inputs.attention, hidden
        placeholder_ids = np.zeros(kind.rows, np.int64)
        parts, traffic = self._record_after_run(
            partial(model.prediction, *arguments, placeholder_ids), kind.rows
        )
        return _RecordedStep(inputs, parts, traffic, hidden)

    def _record_after_run(
        self, stages: Callable[[], Stages], rows: int
    ) -> tuple[list[Recording[Item]], Traffic]:
        """The recorded parts of a step that ran once before, and what its graphs send."""
        self._parts(stages(), rows, run_eagerly)
        traffic_before = self._model.rows.traffic
        parts = self._parts(stages(), rows, self._make)
        return parts, self._model.rows.traffic.subtract(traffic_before)

    def _make(self, step: Callable[[], Item], answer: torch.Tensor | None) -> Recording[Item]:
        self._recordings.append(self._recorder(step, answer))
        return self._recordings[-1]

    def _parts(
        self, stages: Stages, rows: int, make: Callable[..., Recording[Item]]
    ) -> list[Recording[Item]]:
        """A step, made part by part. An exchange between two parts is left out: zeros take its place."""
        stages = between_graphs(stages, rows)
        parts: list[Recording[Item]] = []
        answers: dict[tuple[int, ...], torch.Tensor] = {}
        answer: torch.Tensor | None = None
        while True:
            parts.append(make(partial(next_item, stages, answer), answer))
            item = parts[-1].result
            if isinstance(item, torch.Tensor):
                return parts
            if item.shape not in answers:
                answers[item.shape] = torch.zeros(item.shape, device=self._model.device)
            answer = answers[item.shape]


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded decode step of a rank, and the arrays that it reads."""

    inputs: GraphInputs
    parts: list[Recording[Item]]
    """Each part ends at an exchange that a graph cannot hold, or at the end of the step."""
    traffic: Traffic
    """What the graphs send to other ranks in a replay."""
    hidden: torch.Tensor | None = None
    """[rows, h] the hidden states that it goes on from, if it is of the layer that drafts tokens."""

    def replay(self, batch: TokenBatch, collectives: RowCollectives) -> torch.Tensor:
        """[n, h] the hidden states of the rows of `batch` at the end, until the next replay."""
        self.inputs.fill(batch)
        rows = batch.num_rows
        answer: torch.Tensor | None = None
        for part in self.parts[:-1]:
            item = part.run(answer)
            assert isinstance(item, Exchange)
            answer = item.run(rows)
        hidden = self.parts[-1].run(answer)
        assert isinstance(hidden, torch.Tensor)
        collectives.count_replayed(self.traffic)
        return hidden[:rows]
