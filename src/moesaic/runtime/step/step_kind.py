"""The kinds of steps of which each has a recording on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from moesaic.core.tokens import TokenBatch
from moesaic.models.spec import ModelSpec

FEW_ROWS, ROW_STEP = 4, 8
"""Buckets are powers of two up to FEW_ROWS, then multiples of ROW_STEP."""
CONTEXT_STEP = 1024
"""Recordings are made for contexts of at most CONTEXT_STEP tokens, twice as many, and so on: attention splits
longer contexts among more programs."""


def bucket(rows: int) -> int:
    """The rows of the recording for a step of so many.

    >>> [bucket(rows) for rows in (1, 2, 3, 5, 9, 64)]
    [1, 2, 4, 8, 16, 64]
    """
    return 1 << (rows - 1).bit_length() if rows <= FEW_ROWS else -(-rows // ROW_STEP) * ROW_STEP


class Kind(NamedTuple):
    """Which recording a step takes."""

    rows: int
    """The rows of the recording. A step with fewer rows is padded to them."""
    longest: int
    """Tokens of the longest context that it may have."""
    has_sequences_of_several_rows: bool = False
    """Whether layers that keep states get several rows of a sequence."""

    @classmethod
    def from_batch(cls, batch: TokenBatch, spec: ModelSpec, multiple: int = 1) -> Kind:
        """The kind of a step. multiple: the rows of its recording are a multiple of it."""
        rows = -(-bucket(batch.num_rows) // multiple) * multiple
        contexts = -(-int(batch.context_lens.max()) // CONTEXT_STEP)
        has_sequences_of_several_rows = batch.num_rows > batch.num_sequences and spec.states is not None
        return cls(rows, CONTEXT_STEP << (contexts - 1).bit_length(), has_sequences_of_several_rows)
