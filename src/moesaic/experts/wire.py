"""The messages between an attention worker and an expert server: a fixed header, then plain arrays.

A request has p pairs of m rows. Pair i computes row `rows[i]` with expert `experts[i]`. The answer has a row
of h float32 numbers for each pair, without gate weights. With `partial` it has one row for each of the m
rows: the sum of that row's pairs here times their weights. This is the form of Expert-as-a-Service. It has
fewer bytes and is equal up to rounding.

A barrier call is a request without pairs. Its sender is at the beginning of a step and waits until all are.

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
_PARTIAL, _BARRIER, _BARRIER_WITH_WORK = 1, 2, 3
MOST_ROWS = 1 << 22
"""Maximum rows, and maximum pairs, that the header of a request may name. It bounds damaged headers."""


@dataclass(frozen=True)
class Request:
    """A request and its arrays."""

    layer: int
    attempt: int
    """How often its pairs were sent before, to this or another server."""
    experts: IntArray
    """[p] logical expert ids."""
    rows: IntArray
    """[p] row of each pair."""
    weights: FloatRows | None
    """[p] gate weights. None unless the answer is one weighted sum per row."""
    hidden: FloatRows
    """[m, h] hidden states, a view of the message."""
    work: bool | None = None
    """For a barrier call: whether the sender has rows to compute. None for every other request."""

    @property
    def answer_rows(self) -> int:
        """Rows of the answer. An answer without content still has one row."""
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
    """Write a request into `memory`, which has `size` bytes. The arrays are those of `Request`."""
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
    """Write a barrier call into `memory`, which has `size(0, 0, hidden, False)` bytes."""
    _HEADER.pack_into(memory, 0, _MAGIC, 0, _BARRIER_WITH_WORK if work else _BARRIER, 0, 0, hidden, 0)


def parse(memory: memoryview, num_layers: int, num_experts: int, hidden: int) -> Request:
    """The request in `memory`. Raises DamagedMessage when it is no valid request: the peer is not moesaic."""
    if len(memory) < _HEADER.size:
        raise DamagedMessage(f"a request of {len(memory)} bytes is too short")
    magic, layer, flags, rows, pairs, width, attempt = _HEADER.unpack_from(memory, 0)
    partial = flags == _PARTIAL
    if magic != _MAGIC or flags > _BARRIER_WITH_WORK or layer >= num_layers or width != hidden:
        raise DamagedMessage("a request has a damaged header or is meant for another model")
    if flags >= _BARRIER and (rows or pairs):
        raise DamagedMessage(f"a barrier call claims {rows} rows and {pairs} pairs")
    if max(rows, pairs) > MOST_ROWS or len(memory) != size(rows, pairs, hidden, partial):
        raise DamagedMessage(f"a request of {len(memory)} bytes claims {rows} rows and {pairs} pairs")
    at = _HEADER.size
    # Copy the ids, because a hostile client could change shared memory after the checks.
    named = np.frombuffer(memory, np.int32, 2 * pairs, at).astype(np.int64)
    experts, places = named[:pairs], named[pairs:]
    for name, array, end in (("expert", experts, num_experts), ("row", places, rows)):
        if pairs and array.view(np.uint64).max() >= end:  # negative numbers become huge
            raise DamagedMessage(f"a request names {name} {array.min()} to {array.max()} of {end}")
    at += 8 * pairs
    weights = np.frombuffer(memory, np.float32, pairs, at) if partial else None
    at += 4 * pairs if partial else 0
    values = np.frombuffer(memory, np.float32, rows * hidden, at).reshape(rows, hidden)
    work = flags == _BARRIER_WITH_WORK if flags >= _BARRIER else None
    return Request(layer, attempt, experts, places, weights, values, work)
