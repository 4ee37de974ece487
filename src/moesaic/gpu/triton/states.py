"""Where a sequence's states are, as `TokenBatch.states` says."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places(states, sequence, first, PERIOD: tl.constexpr):
    """The page to read and the one to write by a step that begins at position `first`, and the seat.

    The seat of a padded row is negative: it has no states.
    """
    read, read_position = tl.load(states + 4 * sequence), tl.load(states + 4 * sequence + 1)
    write, seat = tl.load(states + 4 * sequence + 2), tl.load(states + 4 * sequence + 3)
    return tl.where(first // PERIOD * PERIOD == read_position, read, write), write, seat
