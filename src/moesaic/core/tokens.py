"""The rows of one step, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatRows = npt.NDArray[np.float32]

STATE_FIELDS = 4
"""Columns of `TokenBatch.states`."""
STATE_CHUNK = 64
"""States of linear attention are stored at the positions that this divides (`kernels.states`)."""


@dataclass(frozen=True)
class TokenBatch:
    """The n rows of s sequences that one step computes, sequence after sequence.

    A sequence has one row (decode) or many (a chunk of its prompt). There is no other difference between
    prefill and decode.
    """

    token_ids: IntArray
    """[n] input token of each row."""
    positions: IntArray
    """[n] position of each row in its sequence, from 0."""
    query_starts: IntArray
    """[s + 1] rows of sequence i are query_starts[i] : query_starts[i + 1]."""
    context_lens: IntArray
    """[s] tokens of the sequence in the KV cache after this step has written its rows."""
    block_tables: IntArray
    """[s, b] KV block ids of each sequence in order, padded with 0."""
    logit_rows: IntArray
    """[m] rows whose logits are wanted."""
    states: IntArray = field(default_factory=lambda: np.zeros((0, STATE_FIELDS), dtype=np.int64))
    """[s, 4] where the states of each sequence are (`kernels.states`): the page to read, the position at
    which that page stands, the page to write, and the seat. It has no lines if no layer has a state."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    def sequences(self, indices: Sequence[int]) -> TokenBatch:
        """The rows of these sequences, in this order, and those of logit_rows that are among them."""
        starts, stops = self.query_starts[:-1], self.query_starts[1:]
        rows = [np.arange(starts[index], stops[index]) for index in indices]
        wanted = np.concatenate([np.zeros(0, np.int64), *rows])
        return self._select_rows(
            wanted, [len(part) for part in rows], self.context_lens[list(indices)], list(indices)
        )

    def rows(self, start: int, stop: int) -> TokenBatch:
        """Rows start : stop. They may begin or end within a sequence.

        When a sequence is cut at the end, its context_lens counts only the tokens up to the cut.
        """
        first = int(np.searchsorted(self.query_starts, start, side="right")) - 1
        last = int(np.searchsorted(self.query_starts, stop, side="left"))
        cut = np.clip(self.query_starts[first : last + 1], start, stop)
        left_out = self.query_starts[first + 1 : last + 1] - cut[1:]
        lens = self.context_lens[first:last] - left_out
        wanted = np.arange(start, stop)
        return self._select_rows(wanted, np.diff(cut).tolist(), lens, list(range(first, last)))

    def _select_rows(
        self, rows: IntArray, counts: list[int], lens: IntArray, sequences: list[int]
    ) -> TokenBatch:
        """The batch of these rows. rows: [r] rows; counts: number of them in each of the sequences
        `sequences`."""
        return TokenBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            query_starts=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            context_lens=np.ascontiguousarray(lens),
            block_tables=self.block_tables[sequences],
            logit_rows=np.flatnonzero(np.isin(rows, self.logit_rows)),
            states=self.states[sequences] if len(self.states) else self.states,
        )
