"""The state that a layer of linear attention keeps for each sequence, in place of keys and values.

Gated DeltaNet (Yang et al. 2024) has a matrix S [dv, dk] for each value head. Row t multiplies it by a decay
alpha_t and adds an outer product:

    S_t = alpha_t S_{t-1} + u_t k_t^T        u_t = beta_t (v_t - alpha_t S_{t-1} k_t)        o_t = S_t q_t

Here S is stored only at multiples of CHUNK positions. For the rows after it, k, u and the sum of the
logarithms of alpha are stored instead. A row computes

    o_t = G_t S q_t + sum over i <= t of (G_t / G_i) (k_i . q_t) u_i

in this order, where S is the matrix at the last multiple and G_i the product of alpha from there to row i.
So a row's bits depend only on the sequence's tokens: prefill and decode, chunks and preemptions all give the
same.

Before it, a short convolution mixes each channel with those of the rows just before. Its inputs are kept too.
Layers of LFM2 have such a convolution alone (`models/short_convolution.py`), and their states have nothing
else.

Rows with drafted tokens may turn out not to count. Then the next step begins at an earlier position and
writes over what they left in the seat. They never pass a multiple of CHUNK, so no page has anything of them.

The matrices lie in *pages*. A sequence reads one page and writes another one, or the same, when it passes a
multiple of CHUNK. So a page that is not written any more is a snapshot of a prefix. Page 0 has zeros, the
state before the first token. The rows after a multiple lie in the *seat* of the sequence.

Question: How are linear attention and its states computed?
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.core.tokens import STATE_CHUNK as CHUNK
from moesaic.core.tokens import TokenBatch

__all__ = ["CHUNK", "LayerStates", "StateRows", "StateSizes", "state_rows"]


@dataclass(frozen=True)
class StateSizes:
    """What one layer keeps for a sequence."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    """Width of the convolution, with the row itself."""
    max_draft_tokens: int = 0
    """Rows that a step may compute and that may not count: the most drafted tokens of a sequence."""
    convolution_channels: int = 0
    """Channels of a short convolution without the delta rule. There are no heads then; 0 if there are."""

    @classmethod
    def of_convolution(cls, channels: int, taps: int) -> StateSizes:
        """The state of a short convolution alone: its last inputs."""
        return cls(
            key_heads=0, value_heads=0, key_width=0, value_width=0, taps=taps, convolution_channels=channels
        )

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution mixes: query, key and value of all heads, or those given."""
        return (
            self.convolution_channels
            + 2 * self.key_heads * self.key_width
            + self.value_heads * self.value_width
        )

    @property
    def ring(self) -> int:
        """Inputs of the convolution that a seat keeps. Behind the rows that do not count it still has those
        just before them."""
        return self.taps - 1 + self.max_draft_tokens

    @property
    def page_numbers(self) -> int:
        """Float32 numbers of one page."""
        return self.value_heads * self.key_width * self.value_width + (self.taps - 1) * self.channels

    @property
    def seat_numbers(self) -> int:
        """Float32 numbers of one seat."""
        row = self.key_heads * self.key_width + self.value_heads * (self.value_width + 1)
        return CHUNK * row + self.ring * self.channels


@dataclass(frozen=True)
class LayerStates:
    """The pages and seats of one layer, all float32."""

    sizes: StateSizes
    pages: torch.Tensor
    """[pages, value_heads, key_width, value_width] the matrices, transposed."""
    page_tails: torch.Tensor
    """[pages, taps - 1, channels] inputs of the convolution just before the page's position."""
    keys: torch.Tensor
    """[seats, key_heads, CHUNK, key_width] normalized keys of the rows since the last multiple."""
    updates: torch.Tensor
    """[seats, value_heads, CHUNK, value_width] u of these rows."""
    decays: torch.Tensor
    """[seats, value_heads, CHUNK] sum of the logarithms of the decay since the last multiple."""
    tails: torch.Tensor
    """[seats, ring, channels] the last inputs of the convolution. That of position p is in place p % ring."""


@dataclass(frozen=True)
class StateRows:
    """The rows of one sequence in a step, and where its states are."""

    start: int
    stop: int
    """Rows start : stop of the step."""
    first: int
    """Position of the first row."""
    read_page: int
    read_position: int
    write_page: int
    seat: int
    """The page to read, the position at which it stands, the page to write, and the seat: a line of
    `TokenBatch.states`."""

    def page(self, begin: int) -> int:
        """The page that has the state at position `begin`, a multiple of CHUNK."""
        return self.read_page if begin == self.read_position else self.write_page


def state_rows(batch: TokenBatch) -> list[StateRows]:
    """The sequences of a step."""
    counts = batch.query_starts[1:] - batch.query_starts[:-1]
    first = batch.context_lens - counts
    starts, stops = batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist()
    return [
        StateRows(start, stop, position, *states)
        for start, stop, position, states in zip(
            starts, stops, first.tolist(), batch.states.tolist(), strict=True
        )
    ]
