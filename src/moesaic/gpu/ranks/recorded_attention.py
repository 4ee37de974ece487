"""Shared attention in decode steps that are recorded as CUDA graphs.

The first rank records a step as a single process does (`gpu/graphs/graphs.py`). Each of its recordings has a
number. The other ranks have a recording of the same number: graphs of its layers' attention, for as many
rows. Before the first rank replays a part of a step it announces whose attention is in it, and once the step.

Where graphs can hold exchanges of rows (NCCL), a graph of another rank has the layers of one graph of the
first rank, so both have the same exchanges. They are recorded at the same time, since NCCL may register the
memory of both then. Elsewhere a graph of the first rank ends at each exchange. One of another rank has what
is between the two exchanges of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import TokenBatch
from moesaic.experts.collectives.group import Traffic
from moesaic.gpu.graphs.graph_inputs import GraphInputs, run_eagerly
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.models.block import Block
from moesaic.models.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.runtime.group.announcer import Announcer, at_first, free_recordings
from moesaic.runtime.group.arrays import pack, unpack
from moesaic.runtime.group.rows import RowCollectives
from moesaic.runtime.step.running_step import SharedRows
from moesaic.runtime.step.stages import until_output_projection
from moesaic.runtime.step.step_kind import Kind

Result = TypeVar("Result")
_PREPARE, _TRY, _RECORD, _REPLAY = -1, -2, -3, -4
"""The first number of a message to the other ranks, each of int64. The number of a recording follows.

_PREPARE: its `Kind`, of a new recording. _TRY: a layer, whose launches run once without being recorded.
_RECORD: the layers of a graph. _REPLAY: the first layer of a graph, and the step if it is a new one.
"""


class RecordedAttention:
    """On the first rank: the attention of one recorded step. See `stages.RecordedStages`."""

    def __init__(self, announcer: Announcer, number: int, kind: Kind, hidden: torch.Tensor) -> None:
        """hidden: [rows, h] on the device, for what is sent through the host. So no graph keeps that."""
        self._announcer, self._number, self._leaving = announcer, number, hidden
        self._has_run = False
        """Whether the step has run without being recorded."""
        self._part_layers: list[int] = []
        """Layers of the part that is made now, if graphs can hold their exchanges."""
        self._layers: list[tuple[int, ...]] = []
        """The layers of each part."""
        self._step = b""
        """The step of the next replay, until the other ranks have it."""
        announcer.run(partial(announcer.announce, _PREPARE, number, *kind))

    def stages(
        self,
        block: Block,
        layer: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        memory: LayerMemory,
    ) -> Generator[SharedRows, torch.Tensor | None, torch.Tensor]:
        """Runs as `SharedAttention.stages` while the step is recorded. The caller is in `Announcer.run`."""
        announcer, rows, sizes = self._announcer, self._announcer.rows, self._at_first(len(hidden))
        if not self._has_run:
            announcer.announce(_TRY, self._number, layer)
        if rows.capturable:
            self._part_layers.append(layer)
            rows.all_gather(hidden, sizes)
            addend = until_output_projection(block, layer, hidden, positions, attention, memory)
            return rows.reduce_scatter(addend, sizes)
        if self._has_run:
            announcer.announce(_RECORD, self._number, layer)
        self._leaving.copy_(hidden)
        yield SharedRows(partial(self._gather, layer))
        self._leaving.copy_(until_output_projection(block, layer, hidden, positions, attention, memory))
        sums = yield SharedRows(self._scatter, tuple(hidden.shape))
        assert sums is not None
        return sums

    def run_unrecorded(
        self, step: Callable[[], Result], answer: torch.Tensor | None = None
    ) -> Recording[Result]:
        """Run the next part eagerly, as `graph_inputs.run_eagerly`. The other ranks compute with this one."""
        part = self._announcer.run(partial(run_eagerly, step, answer))
        self._layers.append(tuple(self._part_layers))
        self._part_layers.clear()
        return part

    def recorder(self, make: OperationRecorder) -> OperationRecorder:
        """Records the parts that have run unrecorded, in their order. The other ranks record too."""
        layers, self._has_run = iter(self._layers), True

        def make_recording(
            step: Callable[[], Result], expert_rows: torch.Tensor | None = None
        ) -> Recording[Result]:
            return self._announcer.run(partial(self._record, make, step, expert_rows, next(layers)))

        return make_recording

    def begin(self, batch: TokenBatch) -> None:
        """The step of the parts that are replayed from now on."""
        self._step = pack(batch)

    def announce(self, layer: int) -> None:
        """The other ranks replay their graph that begins with this layer."""
        step, self._step = self._step, b""
        self._announcer.announce(_REPLAY, self._number, layer, step=step)

    def _record(
        self,
        make: OperationRecorder,
        step: Callable[[], Result],
        expert_rows: torch.Tensor | None,
        layers: tuple[int, ...],
    ) -> Recording[Result]:
        rows = self._announcer.rows
        if layers:
            self._announcer.announce(_RECORD, self._number, *layers)
        traffic_before = rows.traffic
        recording = make(step, expert_rows)
        if rows.capturable:
            self._announcer.recordings.append(recording)
        announce = partial(self.announce, layers[0]) if layers else None
        return _SharedPart(recording, self._announcer, announce, rows.traffic.subtract(traffic_before))

    def _gather(self, layer: int, count: int) -> None:
        def run() -> None:
            self.announce(layer)
            self._announcer.rows.all_gather(self._leaving[:count], self._at_first(count))

        self._announcer.run(run)

    def _scatter(self, count: int) -> torch.Tensor:
        rows, sizes = self._announcer.rows, self._at_first(count)
        return self._announcer.run(partial(rows.reduce_scatter, self._leaving[:count], sizes))

    def _at_first(self, count: int) -> list[int]:
        return at_first(count, self._announcer.rows.group.size)


@dataclass(frozen=True)
class _SharedPart(Generic[Result]):
    """A recorded part, whose graph may hold exchanges with the other ranks or run between two of them."""

    inner: Recording[Result]
    announcer: Announcer
    announce: Callable[[], None] | None
    """None: the graph holds no exchange."""
    traffic: Traffic
    """What the graph sends to the other ranks."""

    @property
    def result(self) -> Result:
        return self.inner.result

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """Replay the part. The other ranks replay their graph too."""
        return self.announcer.run(partial(self._run, expert_rows))

    def free(self) -> None:
        """Free the part."""
        self.inner.free()

    def _run(self, expert_rows: torch.Tensor | None) -> Result:
        if self.announce is not None:
            self.announce()
        result = self.inner.run(expert_rows)
        self.announcer.rows.count_replayed(self.traffic)
        return result


@dataclass
class _Step:
    """A recording of another rank."""

    inputs: GraphInputs
    hidden: torch.Tensor
    """[rows, h] what its graphs read and what they write, where they hold no exchange."""
    graphs: dict[int, Recording[None]] = field(default_factory=dict)
    """Maps the first layer of each graph to the graph."""
    rows: int = 0
    """The number of rows of the step in `inputs`, without padding."""


class AttentionRecordings:
    """On any other rank: what it records and replays. One graph runs at a time, so all share their memory."""

    def __init__(
        self,
        model: Model,
        memory: LayerMemory,
        device: torch.device,
        block_size: int,
        rows: RowCollectives,
        recorder: OperationRecorder,
        table_width: int,
    ) -> None:
        """table_width: KV blocks of the longest sequence."""
        self._model, self._memory, self._rows = model, memory, rows
        self._inputs = partial(GraphInputs, table_width=table_width, block_size=block_size, device=device)
        self._no_rows = torch.empty(0, model.spec.hidden_size, device=device)
        self._recorder = recorder
        self._steps: dict[int, _Step] = {}
        self._recordings: list[Recording[Any]] = []
        rows.when_closing(partial(free_recordings, self._recordings))

    def is_recording_message(self, message: bytes) -> bool:
        """Whether a message of the first rank is about recordings."""
        code = int.from_bytes(message[:8], "little", signed=True)
        return len(message) >= 24 and len(message) % 8 == 0 and _REPLAY <= code <= _PREPARE

    def follow(self, message: bytes) -> None:
        """Do what the first rank announces. Raises ConnectionLost for a damaged message."""
        code, number, *layer_numbers = np.frombuffer(message[:24], np.int64).tolist()
        if code == _PREPARE:
            if len(message) != 40:
                raise ConnectionLost(f"a recording's message of {len(message)} bytes")
            rows, longest, has_several_rows = np.frombuffer(message[16:], np.int64).tolist()
            inputs = self._inputs(Kind(rows, longest, bool(has_several_rows)))
            hidden = torch.zeros(rows, self._no_rows.shape[1], device=self._no_rows.device)
            self._steps[number] = _Step(inputs, hidden)
            return
        step = self._steps.get(number)
        if step is None or not layer_numbers:
            raise ConnectionLost(f"message {code} for the unknown recording {number}")
        if code == _REPLAY:
            self._replay(step, layer_numbers[0], message[24:])
            return
        layers, spec = np.frombuffer(message[16:], np.int64).tolist(), self._model.spec
        if min(layers) < 0 or max(layers) >= spec.num_layers + spec.predicting:
            raise ConnectionLost(f"a recording of layers {layers}")
        run = partial(self._attend, step, layers)
        if code == _TRY:
            run()
        else:
            step.graphs[layer_numbers[0]] = graph = self._recorder(run, step.hidden)
            if self._rows.capturable:
                self._recordings.append(graph)

    def _attend(self, step: _Step, layers: Sequence[int]) -> None:
        """What a graph has: these layers with their exchanges, or one without them."""
        rows, inputs = self._rows, step.inputs
        sizes = at_first(inputs.kind.rows, rows.group.size)
        for layer in layers:
            hidden = rows.all_gather(self._no_rows, sizes) if rows.capturable else step.hidden
            block = self._model.block(layer)
            addend = until_output_projection(
                block, layer, hidden, inputs.positions, inputs.attention, self._memory
            )
            if rows.capturable:
                rows.reduce_scatter(addend, sizes)
            else:
                step.hidden.copy_(addend)

    def _replay(self, step: _Step, layer: int, batch: bytes) -> None:
        """batch: of the step, if it is a new one."""
        if batch:
            rows = unpack(batch)
            step.inputs.fill(rows)
            step.rows = rows.num_rows
        graph = step.graphs.get(layer)
        if graph is None or not step.rows:
            raise ConnectionLost(f"rows for layer {layer}, which is not recorded")
        if self._rows.capturable:
            graph.run()
            return
        sizes = at_first(step.rows, self._rows.group.size)
        graph.run(self._rows.all_gather(self._no_rows, sizes))
        self._rows.reduce_scatter(step.hidden[: step.rows], sizes)
