"""The rows of one step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenBatch:
    """The rows that one step computes: s sequences, n rows, sequence after sequence.

    A sequence has one row (decode) or many (a chunk of its prompt). Nothing else tells prefill
    from decode.
    """

    token_ids: IntArray
    """[n] input token of each row."""
    positions: IntArray
    """[n] position of each row in its sequence, from 0."""
    query_starts: IntArray
    """[s + 1] rows of sequence i are query_starts[i] : query_starts[i + 1]."""
    context_lens: IntArray
    """[s] tokens of the sequence in the KV cache once this step wrote its rows."""
    block_tables: IntArray
    """[s, b] KV block ids of each sequence in order, padded with 0."""
    logit_rows: IntArray
    """[m] rows whose logits are wanted."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)
