"""Which steps are recorded as CUDA graphs, in which buckets, and the arrays that their recordings read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from moesaic.core.tokens import STATE_FIELDS, IntArray, TokenBatch
from moesaic.kernels.batch import (
    STATE_TILE,
    AttentionBatch,
    Sequences,
    StateSequences,
    list_tiles,
    slots_of,
)
from moesaic.kernels.table import MOST_RECORDED_ROWS
from moesaic.runtime.step.step_kind import Kind

Result = TypeVar("Result")

NO_PLACE = -1
"""Slot and seat of a padded row."""


def is_recorded(batch: TokenBatch) -> bool:
    """Whether this is a decode step: all of its rows give logits, those of next tokens and of drafted ones.

    Attention replays a row of drafted tokens as a sequence of one row: its context ends with itself, and the
    rows before it are in the cache when attention reads that.
    """
    return 0 < batch.num_rows == len(batch.logit_rows) and batch.num_rows <= MOST_RECORDED_ROWS


class EagerPart(Generic[Result]):
    """A part of a step that ran once."""

    def __init__(self, step: Callable[[], Result]) -> None:
        self.result = step()

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """Nothing runs twice."""
        return self.result

    def free(self) -> None:
        """Holds nothing."""


def run_eagerly(step: Callable[[], Result], expert_rows: torch.Tensor | None = None) -> EagerPart[Result]:
    """Takes the place of a recorder, to run the step without one."""
    return EagerPart(step)


class GraphInputs:
    """The arrays that a recording reads, in one array on the device. One copy from pinned memory fills it."""

    def __init__(self, kind: Kind, table_width: int, block_size: int, device: torch.device) -> None:
        self.kind, rows = kind, kind.rows
        sizes = [rows] * 4 + [rows * table_width, rows * STATE_FIELDS]
        of_states = [rows, rows + 1, rows * 3] if kind.has_sequences_of_several_rows else []
        self._host_array = torch.zeros(sum(sizes + of_states), dtype=torch.int64, pin_memory=True)
        self._device_array = torch.zeros(sum(sizes + of_states), dtype=torch.int64, device=device)
        host_parts = [part.numpy() for part in torch.split_with_sizes(self._host_array, sizes + of_states)]
        self._token_ids, self._positions, self._slots, self._contexts = host_parts[:4]
        self._tables, self._states = (part.reshape(rows, -1) for part in host_parts[4:6])
        self._of_states = _StateInputs(*host_parts[6:]) if kind.has_sequences_of_several_rows else None
        device_parts = torch.split_with_sizes(self._device_array, sizes + of_states)
        self.token_ids, self.positions, slots, contexts = device_parts[:4]
        tables, states = (part.view(rows, -1) for part in device_parts[4:6])
        starts, row_numbers = torch.arange(rows + 1, device=device), np.arange(rows + 1)
        sequences = Sequences(contexts, starts, tables, states, kind.longest, single=True)
        state_sequences = None
        if kind.has_sequences_of_several_rows:
            contexts, starts, tiles = device_parts[6:]
            sequence_rows = replace(sequences, contexts=contexts, starts=starts, single=False)
            state_sequences = StateSequences(sequence_rows, tiles.view(rows, 3))
        single_rows = row_numbers[:-1]
        host = TokenBatch(single_rows, single_rows, row_numbers, row_numbers[1:], self._tables, single_rows)
        self.attention = AttentionBatch.from_device(host, block_size, slots, sequences, state_sequences)
        self._copy_event: torch.cuda.Event | None = None
        self._fill(0, 0)

    def fill(self, batch: TokenBatch) -> None:
        """Bring the rows of a step to the device."""
        rows, counts = batch.num_rows, np.diff(batch.query_starts)
        if self._copy_event is not None:
            self._copy_event.synchronize()  # of an earlier step, so it was there long ago
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
        self._slots[rows:] = NO_PLACE
        self._states[sequences:] = NO_PLACE
        self._device_array.copy_(self._host_array, non_blocking=True)
        self._copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copy_event.record(torch.cuda.current_stream(self._device_array.device))


class _StateInputs(NamedTuple):
    """Holds what layers that keep states read where a step has several rows of a sequence. It is 0 where a
    step has none."""

    contexts: IntArray
    """[n] tokens of each sequence."""
    starts: IntArray
    """[n + 1] first row of each sequence."""
    tiles: IntArray
    """[n * 3] as `StateSequences.tiles`."""

    def fill(self, batch: TokenBatch) -> None:
        """Fill in the sequences of a step. They are at most as many as its rows, and so are its tiles."""
        count = batch.num_sequences
        self.contexts[:count], self.contexts[count:] = batch.context_lens, 0
        self.starts[:count], self.starts[count:] = batch.query_starts[:-1], batch.num_rows
        tiles = list_tiles(batch, STATE_TILE).ravel()
        self.tiles[: len(tiles)] = tiles
        self.tiles[len(tiles) :: 3] = len(self.contexts) - 1  # there is no such sequence then, so no seat
