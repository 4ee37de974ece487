"""What attention needs to know about the rows of one step, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch

GROUP_TOKENS = 1 << 11
"""Most padded cache rows that one decode group gathers: more would fall out of the caches between the
gather and the product, and cost page faults."""
GROUP_SPREAD = 1.5
"""Longest over shortest sequence of a decode group, in blocks: bounds the padding."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length with one row each, computed together."""

    rows: torch.Tensor
    """[g] row of each sequence in the step."""
    blocks: torch.Tensor
    """[g, w] KV blocks, padded with 0."""
    lengths: torch.Tensor
    """[g] tokens in the cache."""


@dataclass(frozen=True)
class Chunk:
    """Several rows of one sequence: a piece of its prompt. They are its last tokens."""

    start: int
    stop: int
    """Rows start : stop of the step."""
    blocks: torch.Tensor
    """[w] KV blocks."""
    length: int
    """Tokens in the cache, these rows among them."""

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.length - (self.stop - self.start)


@dataclass(frozen=True)
class AttentionBatch:
    """The step's rows, split by the form of attention that suits them."""

    num_rows: int
    block_size: int
    slots: torch.Tensor
    """[n] where each row's key and value go: block * block_size + offset."""
    decode: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def build(cls, batch: TokenBatch, block_size: int, device: str | torch.device = "cpu") -> AttentionBatch:
        """The attention side of `batch` for a cache of `block_size` tokens a block."""
        counts = np.diff(batch.query_starts)
        single = np.flatnonzero(counts == 1)
        several = np.flatnonzero(counts > 1)
        return cls(
            num_rows=batch.num_rows,
            block_size=block_size,
            slots=_move(_slots(batch, counts, block_size), device),
            decode=tuple(
                _group(batch, group, block_size, device) for group in _split(batch, single, block_size)
            ),
            chunks=tuple(_chunk(batch, int(index), block_size, device) for index in several),
        )


def _move(array: IntArray, device: str | torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def _slots(batch: TokenBatch, counts: IntArray, block_size: int) -> IntArray:
    """[n] cache slot of each row."""
    sequence = np.repeat(np.arange(batch.num_sequences), counts)
    block, offset = np.divmod(batch.positions, block_size)
    slots: IntArray = batch.block_tables[sequence, block] * block_size + offset
    return slots


def _split(batch: TokenBatch, single: IntArray, block_size: int) -> Iterator[IntArray]:
    """Sequences with one row, in groups of similar length: one long context pads no short ones."""
    widths = -(-batch.context_lens[single] // block_size)
    order = np.argsort(widths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        if stop < len(order):
            longest = int(widths[order[stop]])
            spread = longest > GROUP_SPREAD * widths[order[start]] + 1
            if not spread and (stop + 1 - start) * longest * block_size <= GROUP_TOKENS:
                continue
        yield single[order[start:stop]]
        start = stop


def _group(
    batch: TokenBatch, sequences: IntArray, block_size: int, device: str | torch.device
) -> DecodeGroup:
    lengths = batch.context_lens[sequences]
    width = -(-int(lengths.max()) // block_size)
    return DecodeGroup(
        rows=_move(batch.query_starts[sequences], device),
        blocks=_move(batch.block_tables[sequences, :width], device),
        lengths=_move(lengths, device),
    )


def _chunk(batch: TokenBatch, index: int, block_size: int, device: str | torch.device) -> Chunk:
    length = int(batch.context_lens[index])
    width = -(-length // block_size)
    return Chunk(
        start=int(batch.query_starts[index]),
        stop=int(batch.query_starts[index + 1]),
        blocks=_move(batch.block_tables[index, :width], device),
        length=length,
    )
