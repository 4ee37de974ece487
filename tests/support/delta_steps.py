"""Sequences with linear attention, and steps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import CHUNK, LayerStates, StateSizes
from moesaic.kernels.table import Kernels

Piece = tuple[int, int]
"""A sequence and the number of its next rows in a step."""
BLOCK = 1 << 10
"""Tokens of a cache block. Linear attention uses no blocks."""
STATES = tuple(field.name for field in fields(LayerStates) if field.name != "sizes")


def empty_states(sizes: StateSizes, pages: int, seats: int, garbage: float = float("nan")) -> LayerStates:
    """States that no sequence has used: page 0 has zeros, everything else `garbage`."""

    def make(*shape: int) -> torch.Tensor:
        return torch.full(shape, garbage)

    heads, kept = sizes.value_heads, sizes.taps - 1
    states = LayerStates(
        sizes,
        pages=make(pages, heads, sizes.key_width, sizes.value_width),
        page_tails=make(pages, kept, sizes.channels),
        keys=make(seats, sizes.key_heads, CHUNK, sizes.key_width),
        updates=make(seats, heads, CHUNK, sizes.value_width),
        decays=make(seats, heads, CHUNK),
        tails=make(seats, sizes.ring, sizes.channels),
    )
    states.pages[0], states.page_tails[0] = 0, 0
    return states


def copy_states(states: LayerStates) -> LayerStates:
    return LayerStates(states.sizes, **{name: getattr(states, name).clone() for name in STATES})


class Inputs:
    """Weights of a layer, and the rows of some sequences."""

    def __init__(self, sizes: StateSizes, lengths: Sequence[int]) -> None:
        heads = sizes.value_heads
        self.sizes = sizes
        self.rows = [torch.randn(length, sizes.channels) for length in lengths]
        self.gates = [torch.randn(length, 2 * heads) * 2 for length in lengths]
        self.weight = torch.randn(sizes.channels, sizes.taps)
        self.decay, self.bias = -torch.rand(heads), torch.randn(heads)


class Layer:
    """The states of some sequences, which `step` advances. Sequence i has seat i and pages of its own."""

    def __init__(self, native: Kernels, inputs: Inputs, in_place: bool = True) -> None:
        """in_place: whether each sequence has one page, and not two in turn."""
        self.native, self.inputs = native, inputs
        count = len(inputs.rows)
        self.states = empty_states(inputs.sizes, 1 + 2 * count, count)
        self.done = [0] * count
        self.places = [(0, 0, 1 + 2 * index, index) for index in range(count)]
        self.in_place = in_place

    def batch(self, pieces: Sequence[Piece]) -> TokenBatch:
        """The next rows of some sequences."""
        counts = [count for _, count in pieces]
        ends = [self.done[index] + count for index, count in pieces]
        return TokenBatch(
            token_ids=np.zeros(sum(counts), np.int64),
            positions=np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]),
            query_starts=np.concatenate([[0], np.cumsum(counts)]),
            context_lens=np.array(ends),
            block_tables=np.zeros((len(pieces), 1), np.int64),
            logit_rows=np.arange(1),
            states=np.array([self.places[index] for index, _ in pieces]),
        )

    def taken(self, of: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> torch.Tensor:
        """Rows of the pieces, one piece after another."""
        parts = [of[index][self.done[index] : self.done[index] + count] for index, count in pieces]
        return torch.cat(parts)

    def advance(self, pieces: Sequence[Piece]) -> None:
        """After a step: which pages the next one reads and writes."""
        for index, count in pieces:
            read, at, write, seat = self.places[index]
            passed = (self.done[index] + count) // CHUNK * CHUNK
            if passed > at:
                other = write if self.in_place else 4 * index + 3 - write  # pages 2i + 1 and 2i + 2
                read, at, write = write, passed, other
            self.done[index] += count
            self.places[index] = read, at, write, seat

    def compute(self, rows: torch.Tensor, gates: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        inputs = self.inputs
        mixed = self.native.convolve(rows, inputs.weight, self.states, batch)
        return self.native.delta(mixed, gates, inputs.decay, inputs.bias, self.states, batch)

    def step(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The results of the next rows of some sequences, computed together."""
        batch = AttentionBatch.build(self.batch(pieces), BLOCK)
        rows, gates = self.taken(self.inputs.rows, pieces), self.taken(self.inputs.gates, pieces)
        found = self.compute(rows, gates, batch)
        self.advance(pieces)
        return list(found.split([count for _, count in pieces]))

    def run(self, index: int, cuts: Sequence[int]) -> torch.Tensor:
        """The results of a sequence that is computed in steps of so many rows."""
        return torch.cat([self.step([(index, count)])[0] for count in cuts])

    def state(self, index: int) -> list[torch.Tensor]:
        """What a later step of this sequence would read."""
        (read, _, _, seat), states = self.places[index], self.states
        since, kept = self.done[index] % CHUNK, states.sizes.taps - 1
        tail = states.tails[seat, torch.arange(self.done[index] - kept, self.done[index]) % states.sizes.ring]
        of_seat = [each[seat, :, :since] for each in (states.keys, states.updates, states.decays)]
        return [states.pages[read], states.page_tails[read], tail, *of_seat]
