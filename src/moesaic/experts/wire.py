"""What an attention worker and an expert server say to each other: one fixed header, then plain arrays.

A request asks for p pairs of m rows; pair i is row `rows[i]` through expert `experts[i]`. The answer has a
row of h float32 numbers for each pair, unweighted, or, with `partial`, one for each row: the sum of its pairs
here times their weights (the form of Expert-as-a-Service: fewer bytes, equal up to rounding).

A knock is a request without pairs: its sender is at the beginning of a step and waits until all are.

    header | experts int32 [p] | rows int32 [p] | weights float32 [p], if partial | hidden float32 [m, h]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import DamagedMessage
from moesaic.core.tokens import IntArray

FloatRows = npt.NDArray[np.float32]
Index = npt.NDArray[np.int32]

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
    experts: Index
    """[p] logical ids."""
    rows: Index
    """[p] row of each pair."""
    weights: FloatRows | None
    """[p] gate weights; None unless one weighted sum per row is asked for."""
    hidden: FloatRows
    """[m, h]"""

    work: bool | None = None
    """Of a knock: whether the sender has rows to compute. None for every other request."""

    def fill(self, experts: IntArray, rows: IntArray, weights: FloatRows | None, hidden: FloatRows) -> None:
        """Write what is asked, of a request that `begin` made."""
        self.experts[:] = experts
        self.rows[:] = rows
        if self.weights is not None:
            self.weights[:] = weights
        self.hidden[:] = hidden

    @property
    def answer_rows(self) -> int:
        """Rows of the answer; an empty one has a row that means nothing."""
        return max(1, len(self.experts) if self.weights is None else len(self.hidden))


def size(rows: int, pairs: int, hidden: int, partial: bool) -> int:
    """Bytes of a request."""
    return _HEADER.size + 4 * pairs * (3 if partial else 2) + 4 * rows * hidden


def begin(
    memory: memoryview,
    layer: int,
    rows: int,
    pairs: int,
    hidden: int,
    partial: bool = False,
    attempt: int = 0,
) -> Request:
    """Writes the header into `memory` (of `size` bytes) and returns the arrays behind it, to be filled."""
    flags = _PARTIAL if partial else 0
    _HEADER.pack_into(memory, 0, _MAGIC, layer, flags, rows, pairs, hidden, attempt)
    return _arrays(memory, layer, rows, pairs, hidden, partial, attempt)


def knock(memory: memoryview, hidden: int, work: bool) -> None:
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
    request = _arrays(memory, layer, rows, pairs, hidden, partial, attempt)
    # Copies: in shared memory a hostile client could change what was checked.
    experts, places = request.experts.copy(), request.rows.copy()
    for name, array, end in (("expert", experts, num_experts), ("row", places, rows)):
        if pairs and not 0 <= int(array.min()) <= int(array.max()) < end:
            raise DamagedMessage(f"a request names {name} {int(array.min())} to {int(array.max())} of {end}")
    work = flags == _KNOCK_WITH_WORK if flags >= _KNOCK else None
    return replace(request, experts=experts, rows=places, work=work)


def _arrays(
    memory: memoryview, layer: int, rows: int, pairs: int, hidden: int, partial: bool, attempt: int
) -> Request:
    at = _HEADER.size
    experts = np.frombuffer(memory, dtype=np.int32, count=pairs, offset=at)
    places = np.frombuffer(memory, dtype=np.int32, count=pairs, offset=at + 4 * pairs)
    at += 8 * pairs
    weights = np.frombuffer(memory, dtype=np.float32, count=pairs, offset=at) if partial else None
    at += 4 * pairs if partial else 0
    values = np.frombuffer(memory, dtype=np.float32, count=rows * hidden, offset=at).reshape(rows, hidden)
    return Request(layer, attempt, experts, places, weights, values)
