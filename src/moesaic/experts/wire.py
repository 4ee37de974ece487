"""What an attention worker and an expert server say to each other: one fixed header, then plain arrays.

A request asks for p pairs of m rows; pair i is row `rows[i]` through expert `experts[i]`. The answer has a
row of h float32 numbers for each pair, unweighted, or, with `partial`, one for each row: the sum of its pairs
here times their weights (the form of Expert-as-a-Service: fewer bytes, equal up to rounding).

A knock is a request without pairs: its sender is at the beginning of a step and waits until all are.

    header | experts int32 [p] | rows int32 [p] | weights float32 [p], if partial | hidden float32 [m, h]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import DamagedMessage
from moesaic.core.tokens import FloatRows, IntArray

_HEADER = struct.Struct("<4sHHIIII")  # magic, layer, flags, rows, pairs, hidden size, attempt; 24 bytes
_MAGIC = b"MOE1"
_PARTIAL, _KNOCK, _KNOCK_WITH_WORK = 1, 2, 3
MOST_ROWS = 1 << 22
"""Of one request: what a damaged header may at most claim."""


@dataclass(frozen=True)
class Request:
    """A request and its arrays."""

    layer: int
    attempt: int
    """How often its pairs were sent before, to whomever."""
    experts: IntArray
    """[p] logical ids."""
    rows: IntArray
    """[p] row of each pair."""
    weights: FloatRows | None
    """[p] gate weights; None unless one weighted sum per row is asked for."""
    hidden: FloatRows
    """[m, h] in the message itself."""
    work: bool | None = None
    """Of a knock: whether the sender has rows to compute. None for every other request."""

    @property
    def answer_rows(self) -> int:
        """Rows of the answer; an empty one has a row that means nothing."""
        return max(1, len(self.experts) if self.weights is None else len(self.hidden))


def size(rows: int, pairs: int, hidden: int, partial: bool) -> int:
    """Bytes of a request."""
    return _HEADER.size + 4 * pairs * (3 if partial else 2) + 4 * rows * hidden


def write(
    memory: memoryview,
    layer: int,
    experts: IntArray,
    rows: IntArray,
    weights: FloatRows | None,
    hidden: FloatRows,
    attempt: int = 0,
) -> None:
    """A request into `memory` (of `size` bytes). The arrays are those of `Request`."""
    (count, width), pairs = hidden.shape, len(experts)
    flags = 0 if weights is None else _PARTIAL
    _HEADER.pack_into(memory, 0, _MAGIC, layer, flags, count, pairs, width, attempt)
    named = np.frombuffer(memory, np.int32, 2 * pairs, _HEADER.size)
    named[:pairs], named[pairs:] = experts, rows
    at = _HEADER.size + 8 * pairs
    if weights is not None:
        np.frombuffer(memory, np.float32, pairs, at)[:] = weights
        at += 4 * pairs
    np.frombuffer(memory, np.float32, count * width, at).reshape(count, width)[:] = hidden


def arrive(memory: memoryview, hidden: int, work: bool) -> None:
    """Writes a knock into `memory` (of `size` 0, 0)."""
    _HEADER.pack_into(memory, 0, _MAGIC, 0, _KNOCK_WITH_WORK if work else _KNOCK, 0, 0, hidden, 0)


def parse(memory: memoryview, num_layers: int, num_experts: int, hidden: int) -> Request:
    """The request in `memory`. Raises DamagedMessage when it is none: the peer is not one of ours."""
    if len(memory) < _HEADER.size:
        raise DamagedMessage(f"a request of {len(memory)} bytes is too short")
    magic, layer, flags, rows, pairs, width, attempt = _HEADER.unpack_from(memory, 0)
    partial = flags == _PARTIAL
    if magic != _MAGIC or flags > _KNOCK_WITH_WORK or layer >= num_layers or width != hidden:
        raise DamagedMessage("a request has a damaged header or is meant for another model")
    if flags >= _KNOCK and (rows or pairs):
        raise DamagedMessage(f"a knock claims {rows} rows and {pairs} pairs")
    if max(rows, pairs) > MOST_ROWS or len(memory) != size(rows, pairs, hidden, partial):
        raise DamagedMessage(f"a request of {len(memory)} bytes claims {rows} rows and {pairs} pairs")
    at = _HEADER.size
    # A copy: in shared memory a hostile client could change what was checked.
    named = np.frombuffer(memory, np.int32, 2 * pairs, at).astype(np.int64)
    experts, places = named[:pairs], named[pairs:]
    for name, array, end in (("expert", experts, num_experts), ("row", places, rows)):
        if pairs and array.view(np.uint64).max() >= end:  # negative ones are huge
            raise DamagedMessage(f"a request names {name} {array.min()} to {array.max()} of {end}")
    at += 8 * pairs
    weights = np.frombuffer(memory, np.float32, pairs, at) if partial else None
    at += 4 * pairs if partial else 0
    values = np.frombuffer(memory, np.float32, rows * hidden, at).reshape(rows, hidden)
    work = flags == _KNOCK_WITH_WORK if flags >= _KNOCK else None
    return Request(layer, attempt, experts, places, weights, values, work)
