"""What attention needs to know about the rows of one step. It is computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.kernels.moving import move_array

GROUP_TOKENS = 1 << 11
"""Maximum number of padded cache rows that one decode group gathers. More rows would leave the caches
between the gather and the product, and cost page faults."""
GROUP_SPREAD = 1.5
"""Maximum ratio of the longest to the shortest sequence of a decode group, in blocks. It bounds the
padding."""
STATE_TILE = 16
"""Rows of a tile of `AttentionBatch.state_sequences`, where a sequence has several."""


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
    """Consecutive rows of one sequence, its last tokens: a part of its prompt, or the one row of a decode
    step."""

    start: int
    stop: int
    """Rows start : stop of the step."""
    blocks: torch.Tensor
    """[w] KV blocks."""
    length: int
    """Tokens in the cache, including these rows."""

    @property
    def first(self) -> int:
        """Position of the first row."""
        return self.length - (self.stop - self.start)


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of a step as kernels use them."""

    batch: TokenBatch
    block_size: int
    device: str | torch.device
    slots: torch.Tensor
    """[n] cache slot of each row's key and value: block * block_size + offset."""

    @classmethod
    def build(cls, batch: TokenBatch, block_size: int, device: str | torch.device = "cpu") -> AttentionBatch:
        """The attention side of `batch` for a cache of `block_size` tokens a block."""
        slots = slots_of(batch, np.diff(batch.query_starts), block_size)
        return cls(batch, block_size, device, _move(slots, device))

    @classmethod
    def build_reusable(cls, batch: TokenBatch, block_size: int, max_blocks: int) -> AttentionBatch:
        """A copy of a step. Its arrays can hold any other step with as many rows and sequences."""
        tables = np.zeros((batch.num_sequences, max_blocks), dtype=np.int64)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        names = ("token_ids", "positions", "query_starts", "context_lens", "logit_rows")
        copies = {name: np.array(getattr(batch, name), dtype=np.int64) for name in names}
        states = np.array(batch.states, dtype=np.int64)
        return cls.build(TokenBatch(block_tables=tables, states=states, **copies), block_size)

    @classmethod
    def from_device(
        cls,
        batch: TokenBatch,
        block_size: int,
        slots: torch.Tensor,
        sequences: Sequences,
        state_sequences: StateSequences | None = None,
    ) -> AttentionBatch:
        """A step whose arrays are on the device already, and may change there.

        state_sequences: where layers with states have other sequences than attention, which takes single
        rows.
        """
        batch_on_device = cls(batch, block_size, slots.device, slots)
        batch_on_device.__dict__["on_device"] = sequences  # where `cached_property` looks first
        if state_sequences is not None:
            batch_on_device.__dict__["state_sequences"] = state_sequences
        return batch_on_device

    def fill_slots(self) -> None:  # in place, since a recorded step reads the slots at the same address
        """Recompute the slots after the arrays of `batch` have changed."""
        np.copyto(self.slots.numpy(), slots_of(self.batch, np.diff(self.batch.query_starts), self.block_size))

    @cached_property
    def decode(self) -> tuple[DecodeGroup, ...]:
        """Sequences with one row, grouped by length. A sequence without others of similar length is a
        chunk."""
        groups = (group for group in self._groups if len(group) > 1)
        return tuple(_group(self.batch, group, self.block_size, self.device) for group in groups)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Sequences with several rows, and those that `decode` leaves out. A chunk needs no padding."""
        # A group of one would gather its cache for nothing: a chunk reads the same blocks without padding.
        multi_row = np.flatnonzero(np.diff(self.batch.query_starts) > 1).tolist()
        ungrouped = [int(group[0]) for group in self._groups if len(group) == 1]
        return tuple(
            _chunk(self.batch, index, self.block_size, self.device) for index in multi_row + ungrouped
        )

    @cached_property
    def _groups(self) -> tuple[IntArray, ...]:
        single = np.flatnonzero(np.diff(self.batch.query_starts) == 1)
        return tuple(_split(self.batch, single, self.block_size))

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of query_starts, context_lens and block_tables, dense int64, to be read in place."""
        first, second, third, _ = self._dense
        return first.ctypes.data, second.ctypes.data, third.ctypes.data

    @cached_property
    def state_addresses(self) -> tuple[int, int, int]:
        """Addresses of query_starts, context_lens and states, dense int64, to be read in place."""
        first, second, _, fourth = self._dense
        return first.ctypes.data, second.ctypes.data, fourth.ctypes.data

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Number of sequences, width of the block tables, tokens in a block."""
        return self.batch.num_sequences, self.batch.block_tables.shape[1], self.block_size

    @cached_property
    def on_device(self) -> Sequences:
        """The sequences of the step as kernels on a GPU read them. Copied there once a step."""
        return Sequences.from_batch(self)

    @cached_property
    def state_sequences(self) -> StateSequences:
        """The sequences of the step for layers that keep states."""
        sequences = self.on_device
        return StateSequences(sequences, self.tiles(1 if sequences.single else STATE_TILE))

    def tiles(self, max_rows: int) -> torch.Tensor:
        """[t, 3] int32 (sequence, first row, end): the step in tiles of at most `max_rows` rows of a
        sequence."""
        if max_rows not in self._tiles:
            self._tiles[max_rows] = move_array(list_tiles(self.batch, max_rows), self.device)
        return self._tiles[max_rows]

    @cached_property
    def _tiles(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def _dense(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        rows = self.batch
        arrays = (rows.query_starts, rows.context_lens, rows.block_tables, rows.states)
        first, second, third, fourth = (np.ascontiguousarray(array, dtype=np.int64) for array in arrays)
        return first, second, third, fourth


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step on its device, for all of its layers."""

    contexts: torch.Tensor
    """[s] tokens in the cache."""
    starts: torch.Tensor
    """[s + 1] first row of each sequence, and the number of rows."""
    tables: torch.Tensor
    """[s, w] KV blocks."""
    states: torch.Tensor
    """[s, 4] as `TokenBatch.states`, or [0, 4]."""
    longest: int
    """Tokens of the longest context."""
    single: bool
    """Whether every sequence has one row."""

    @classmethod
    def from_batch(cls, batch: AttentionBatch) -> Sequences:
        """Copies the sequences of a step to its device. The step has at least one sequence."""
        rows = batch.batch
        arrays = (rows.context_lens, rows.query_starts, rows.block_tables, rows.states)
        single = rows.num_rows == rows.num_sequences
        contexts, starts, tables, states = (_move(array, batch.device) for array in arrays)
        return cls(contexts, starts, tables, states, int(rows.context_lens.max()), single)


class StateSequences(NamedTuple):
    """The sequences of a step whose rows a layer with states takes one after another."""

    sequences: Sequences
    tiles: torch.Tensor
    """[t, 3] as `AttentionBatch.tiles`: of STATE_TILE rows, or of one where every sequence has one."""


def list_tiles(rows: TokenBatch, max_rows: int) -> npt.NDArray[np.int32]:
    """[t, 3] (sequence, first row, end): the step in tiles of at most `max_rows` rows of a sequence."""
    tiles = [
        (sequence, row, min(row + max_rows, stop))
        for sequence, (start, stop) in enumerate(pairwise(rows.query_starts.tolist()))
        for row in range(start, stop, max_rows)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 3)


def _move(array: IntArray, device: str | torch.device) -> torch.Tensor:
    return move_array(np.ascontiguousarray(array, dtype=np.int64), device)


def slots_of(batch: TokenBatch, counts: IntArray, block_size: int) -> IntArray:
    """[n] cache slot of each row. counts: [s] rows of each sequence."""
    sequence = np.repeat(np.arange(batch.num_sequences), counts)
    block, offset = np.divmod(batch.positions, block_size)
    slots: IntArray = batch.block_tables[sequence, block] * block_size + offset
    return slots


def _split(batch: TokenBatch, single: IntArray, block_size: int) -> Iterator[IntArray]:
    """Sequences with one row in groups of similar length, so that one long context does not pad short
    ones."""
    widths = -(-batch.context_lens[single] // block_size)
    order = np.argsort(widths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        if stop < len(order):
            # `order` is ascending, so the next sequence is the longest of the group that it would join.
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
