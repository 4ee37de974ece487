"""Which steps are recorded as CUDA graphs, in which buckets, and the arrays that their recordings read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from moesaic.core.tokens import STATE_FIELDS, TokenBatch
from moesaic.kernels.batch import AttentionBatch, Sequences, slots_of
from moesaic.models.spec import ModelSpec

Result = TypeVar("Result")

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


def longest(contexts: int) -> int:
    """The longest context that the recording for a step with this one is made for."""
    return CONTEXT_STEP << (-(-contexts // CONTEXT_STEP) - 1).bit_length()


def is_recorded(batch: TokenBatch, spec: ModelSpec) -> bool:
    """Whether this is a decode step: all of its rows give logits, those of next tokens and of drafted ones.

    A row of drafted tokens is replayed as a sequence of one row: its context ends with itself, and the rows
    before it are in the cache when attention reads that. With states a sequence's rows are one after another,
    so steps with drafted tokens are not recorded for models that have some.
    """
    rows = batch.num_rows
    single = rows == batch.num_sequences or spec.states is None
    return 0 < rows == len(batch.logit_rows) and rows <= MOST_ROWS and single


class Unrecorded(Generic[Result]):
    """A part of a step that ran once."""

    def __init__(self, step: Callable[[], Result]) -> None:
        self.result = step()

    def run(self, given: torch.Tensor | None = None) -> Result:
        """Nothing runs twice."""
        return self.result

    def free(self) -> None:
        """Holds nothing."""


def unrecorded(step: Callable[[], Result], given: torch.Tensor | None = None) -> Unrecorded[Result]:
    """Takes the place of a recorder, to run the step without one."""
    return Unrecorded(step)


class GraphInputs:
    """The arrays that a recording reads, in one array on the device. One copy from pinned memory fills it."""

    def __init__(
        self, rows: int, table_width: int, longest: int, block_size: int, device: torch.device
    ) -> None:
        sizes = [rows] * 4 + [rows * table_width, rows * STATE_FIELDS]
        self._here = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=True)
        self._there = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        here = [one.numpy() for one in torch.split_with_sizes(self._here, sizes)]
        self._token_ids, self._positions, self._slots, self._contexts = here[:4]
        self._tables, self._states = (one.reshape(rows, -1) for one in here[4:])
        there = torch.split_with_sizes(self._there, sizes)
        self.token_ids, self.positions, slots, contexts = there[:4]
        tables, states = (one.view(rows, -1) for one in there[4:])
        starts, counted = torch.arange(rows + 1, device=device), np.arange(rows + 1)
        sequences = Sequences(contexts, starts, tables, states, longest, single=True)
        each = counted[:-1]
        host = TokenBatch(each, each, counted, counted[1:], self._tables, each)
        self.attention = AttentionBatch.placed(host, block_size, slots, sequences)
        self._copied: torch.cuda.Event | None = None
        self._fill(0)

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
        self._fill(rows)

    def _fill(self, rows: int) -> None:
        self._token_ids[rows:] = self._positions[rows:] = self._contexts[rows:] = 0
        self._slots[rows:] = NOWHERE
        self._states[rows:] = NOWHERE
        self._there.copy_(self._here, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(self._there.device))
