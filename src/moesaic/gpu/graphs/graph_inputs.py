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

NOWHERE = -1
"""Slot and seat of a padded row."""


def is_recorded(batch: TokenBatch) -> bool:
    """Whether this is a decode step: all of its rows give logits, those of next tokens and of drafted ones.

    Attention replays a row of drafted tokens as a sequence of one row: its context ends with itself, and the
    rows before it are in the cache when attention reads that.
    """
    return 0 < batch.num_rows == len(batch.logit_rows) and batch.num_rows <= MOST_RECORDED_ROWS


class Unrecorded(Generic[Result]):
    """A part of a step that ran once."""

    def __init__(self, step: Callable[[], Result]) -> None:
        self.result = step()

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """Nothing runs twice."""
        return self.result

    def free(self) -> None:
        """Holds nothing."""


def unrecorded(step: Callable[[], Result], expert_rows: torch.Tensor | None = None) -> Unrecorded[Result]:
    """Takes the place of a recorder, to run the step without one."""
    return Unrecorded(step)


class GraphInputs:
    """The arrays that a recording reads, in one array on the device. One copy from pinned memory fills it."""

    def __init__(self, kind: Kind, table_width: int, block_size: int, device: torch.device) -> None:
        self.kind, rows = kind, kind.rows
        sizes = [rows] * 4 + [rows * table_width, rows * STATE_FIELDS]
        of_states = [rows, rows + 1, rows * 3] if kind.has_sequences_of_several_rows else []
        self._here = torch.zeros(sum(sizes + of_states), dtype=torch.int64, pin_memory=True)
        self._there = torch.zeros(sum(sizes + of_states), dtype=torch.int64, device=device)
        here = [one.numpy() for one in torch.split_with_sizes(self._here, sizes + of_states)]
        self._token_ids, self._positions, self._slots, self._contexts = here[:4]
        self._tables, self._states = (one.reshape(rows, -1) for one in here[4:6])
        self._of_states = _OfStates(*here[6:]) if kind.has_sequences_of_several_rows else None
        there = torch.split_with_sizes(self._there, sizes + of_states)
        self.token_ids, self.positions, slots, contexts = there[:4]
        tables, states = (one.view(rows, -1) for one in there[4:6])
        starts, counted = torch.arange(rows + 1, device=device), np.arange(rows + 1)
        sequences = Sequences(contexts, starts, tables, states, kind.longest, single=True)
        taken = None
        if kind.has_sequences_of_several_rows:
            contexts, starts, tiles = there[6:]
            several = replace(sequences, contexts=contexts, starts=starts, single=False)
            taken = StateSequences(several, tiles.view(rows, 3))
        each = counted[:-1]
        host = TokenBatch(each, each, counted, counted[1:], self._tables, each)
        self.attention = AttentionBatch.from_device(host, block_size, slots, sequences, taken)
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
        tiles = list_tiles(batch, STATE_TILE).ravel()
        self.tiles[: len(tiles)] = tiles
        self.tiles[len(tiles) :: 3] = len(self.contexts) - 1  # there is no such sequence then, so no seat
