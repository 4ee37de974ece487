"""Decode steps on a GPU that are recorded as CUDA graphs, one for each bucket of rows.

A step of fewer rows than its bucket has is padded. A padded row has no context, no cache slot and no seat, so
it reads and writes nothing that another row sees. A recording is made with padded rows alone. The same
launches run once before it, to compile and allocate what a recording must not.

A row of drafted tokens is replayed as a sequence of one row: its context ends with itself, and the rows
before it are in the cache when attention reads that. Layers that keep states take the rows of a sequence one
after another. So a model with such layers has another recording of each bucket for steps with drafted tokens.
It has as many sequences as rows. Padded ones have no rows and no seat.

Where the experts are in this process, one graph is the whole step. Otherwise a graph ends at each request and
at each merge, as the parts of `recorded.py` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from moesaic.core.tokens import STATE_FIELDS, IntArray, TokenBatch
from moesaic.experts.client import ExpertRequest
from moesaic.kernels.batch import (
    STATE_TILE,
    AttentionBatch,
    Sequences,
    StateSequences,
    slots_of,
    tiles_of,
)
from moesaic.kernels.moving import pinned
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.runtime.step.recordings import Item, RecordingRunner, SharedMemory, next_item
from moesaic.runtime.step.running_step import PendingMerge, StepGenerator, StepResult

MOST_ROWS = 256
"""Steps of more rows are not recorded: their launches take less time than what they compute."""
FEW_ROWS, ROW_STEP = 4, 8
"""Buckets are powers of two up to FEW_ROWS, then multiples of ROW_STEP."""
CONTEXT_STEP = 1024
"""Recordings are made for contexts of at most CONTEXT_STEP tokens, twice as many, and so on: attention splits
longer contexts among more programs."""
NOWHERE = -1
"""Slot and seat of a padded row."""


def bucket(rows: int) -> int:
    """The rows of the recording for a step of so many.

    >>> [bucket(rows) for rows in (1, 2, 3, 5, 9, 64)]
    [1, 2, 4, 8, 16, 64]
    """
    return 1 << (rows - 1).bit_length() if rows <= FEW_ROWS else -(-rows // ROW_STEP) * ROW_STEP


def _longest(contexts: int) -> int:
    """The longest context that the recording for a step with this one is made for."""
    return CONTEXT_STEP << (-(-contexts // CONTEXT_STEP) - 1).bit_length()


class Kind(NamedTuple):
    """Which recording a step takes."""

    rows: int
    """With padded ones."""
    longest: int
    """Tokens of the longest context that it may have."""
    several: bool
    """Whether layers that keep states get several rows of a sequence."""


class GraphRunner(RecordingRunner["_RecordedStep"]):
    """Replays decode steps and runs every other step operation by operation."""

    def _is_recorded(self, batch: TokenBatch) -> bool:
        """A decode step is one whose rows all give logits: those of next tokens, and of drafted ones."""
        rows = batch.num_rows
        return 0 < rows == len(batch.logit_rows) and rows <= MOST_ROWS

    def _run(self, batch: TokenBatch, memory: SharedMemory[_RecordedStep]) -> StepGenerator:
        """There is a recording for each kind of step."""
        several = batch.num_rows > batch.num_sequences and self._eager.stages.model.spec.states is not None
        kind = Kind(bucket(batch.num_rows), _longest(int(batch.context_lens.max())), several)
        if kind not in memory.steps:
            memory.steps[kind] = self._record(kind, memory.recorder)
        return memory.steps[kind].replay(batch)

    def _record(self, kind: Kind, recorder: OperationRecorder) -> _RecordedStep:
        """A recording of padded rows. The same launches ran once before it."""
        stages = self._eager.stages
        inputs = _Inputs(kind, self._table_width, stages.block_size, stages.device)
        spec = stages.model.spec
        answers = torch.zeros(kind.rows, max(1, spec.top_k), spec.hidden_size, device=stages.device)
        for make in (_unrecorded, recorder):
            generator = self._whole(stages.run(inputs.token_ids, inputs.positions, inputs.attention))
            parts = _parts(generator, answers, make)
        return _RecordedStep(inputs, parts)


class _Unrecorded:
    """A part of a step that ran once."""

    def __init__(self, step: Callable[[], Item]) -> None:
        self.result = step()

    def run(self, given: torch.Tensor | None = None) -> Item:
        """Nothing runs twice."""
        return self.result


def _unrecorded(step: Callable[[], Item], given: torch.Tensor | None = None) -> _Unrecorded:
    """Takes the place of a recorder, to run the step without one."""
    return _Unrecorded(step)


def _parts(
    generator: StepGenerator, answers: torch.Tensor, make: Callable[..., Recording[Item]]
) -> list[Recording[Item]]:
    """A step, made part by part. answers: [n, k, h] in place of what experts answer."""
    parts: list[Recording[Item]] = []
    given: torch.Tensor | None = None
    while True:
        parts.append(make(partial(next_item, generator, given), given))
        item = parts[-1].result
        if isinstance(item, StepResult):
            return parts
        given = answers if isinstance(item, PendingMerge) else None


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded decode step and the arrays that it reads."""

    inputs: _Inputs
    parts: list[Recording[Item]]
    """Each part ends at a request, at a merge, or at the end of the step."""

    def replay(self, batch: TokenBatch) -> StepGenerator:
        """The same launches on the rows of `batch`, whose results come without those of padded rows."""
        self.inputs.fill(batch)
        rows = batch.num_rows
        answer: torch.Tensor | None = None
        for part in self.parts[:-1]:
            item = part.run(_sendable(answer))
            assert not isinstance(item, StepResult)
            answer = yield _cut(item, rows)
        result = self.parts[-1].run(_sendable(answer))
        assert isinstance(result, StepResult)
        ids = [torch.as_tensor(one)[:rows] for one in result.expert_ids]
        return StepResult(result.hidden[:rows], expert_ids=ids)


def _sendable(answer: torch.Tensor | None) -> torch.Tensor | None:
    return pinned(answer) if answer is not None and answer.device.type == "cpu" else answer


def _cut(item: ExpertRequest | PendingMerge | None, rows: int) -> ExpertRequest | PendingMerge | None:
    """The item without padded rows."""
    if isinstance(item, PendingMerge):
        return item.map(lambda one: one[:rows])
    if item is None:
        return None
    weights = None if item.weights is None else item.weights[:rows]
    return ExpertRequest(item.layer, item.hidden[:rows], item.expert_ids[:rows], weights)


class _Inputs:
    """The arrays that a recording reads, in one array on the device. One copy from pinned memory fills it."""

    def __init__(self, kind: Kind, table_width: int, block_size: int, device: torch.device) -> None:
        self.kind, rows = kind, kind.rows
        sizes = [rows] * 4 + [rows * table_width, rows * STATE_FIELDS]
        of_states = [rows, rows + 1, rows * 3] if kind.several else []
        self._here = torch.zeros(sum(sizes + of_states), dtype=torch.int64, pin_memory=True)
        self._there = torch.zeros(sum(sizes + of_states), dtype=torch.int64, device=device)
        here = [one.numpy() for one in torch.split_with_sizes(self._here, sizes + of_states)]
        self._token_ids, self._positions, self._slots, self._contexts = here[:4]
        self._tables, self._states = (one.reshape(rows, -1) for one in here[4:6])
        self._of_states = _OfStates(*here[6:]) if kind.several else None
        there = torch.split_with_sizes(self._there, sizes + of_states)
        self.token_ids, self.positions, slots, contexts = there[:4]
        tables, states = (one.view(rows, -1) for one in there[4:6])
        starts, counted = torch.arange(rows + 1, device=device), np.arange(rows + 1)
        sequences = Sequences(contexts, starts, tables, states, kind.longest, single=True)
        taken = None
        if kind.several:
            contexts, starts, tiles = there[6:]
            several = replace(sequences, contexts=contexts, starts=starts, single=False)
            taken = StateSequences(several, tiles.view(rows, 3))
        each = counted[:-1]
        host = TokenBatch(each, each, counted, counted[1:], self._tables, each)
        self.attention = AttentionBatch.placed(host, block_size, slots, sequences, taken)
        self._copied: torch.cuda.Event | None = None
        self._fill(0, 0)

    def fill(self, batch: TokenBatch) -> None:
        """Bring the rows of a step to the device."""
        rows, counts = batch.num_rows, np.diff(batch.query_starts)
        if self._copied is not None:
            self._copied.synchronize()  # of an earlier step, so it was there long ago
        self._token_ids[:rows] = batch.token_ids
        self._positions[:rows] = batch.positions
        self._slots[:rows] = slots_of(batch, counts, self.attention.block_size)
        self._contexts[:rows] = batch.positions + 1
        tables = batch.block_tables if rows == len(counts) else np.repeat(batch.block_tables, counts, axis=0)
        self._tables[:rows, : tables.shape[1]] = tables
        self._states[: len(batch.states)] = batch.states
        if self._of_states is not None:
            self._of_states.fill(batch)
        self._fill(rows, len(batch.states))

    def _fill(self, rows: int, sequences: int) -> None:
        """Pad behind so many rows, and so many sequences with states, and copy all to the device."""
        self._token_ids[rows:] = self._positions[rows:] = self._contexts[rows:] = 0
        self._slots[rows:] = NOWHERE
        self._states[sequences:] = NOWHERE
        self._there.copy_(self._here, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(self._there.device))


class _OfStates(NamedTuple):
    """For layers that keep states, where a step has several rows of a sequence. All 0: it has none."""

    contexts: IntArray
    """[n] tokens of each sequence."""
    starts: IntArray
    """[n + 1] first row of each sequence."""
    tiles: IntArray
    """[n * 3] as `StateSequences.tiles`."""

    def fill(self, batch: TokenBatch) -> None:
        """With the sequences of a step. There are at most as many as rows, and at most as many tiles."""
        count = batch.num_sequences
        self.contexts[:count], self.contexts[count:] = batch.context_lens, 0
        self.starts[:count], self.starts[count:] = batch.query_starts[:-1], batch.num_rows
        tiles = tiles_of(batch, STATE_TILE).ravel()
        self.tiles[: len(tiles)] = tiles
        self.tiles[len(tiles) :: 3] = len(self.contexts) - 1  # there is no such sequence then, so no seat
