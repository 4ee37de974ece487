"""The messages between an attention worker and an expert server: a fixed header, then plain arrays.

A request has p pairs of m rows. Pair i computes row `rows[i]` with expert `experts[i]`. The answer has a row
of h float32 numbers for each pair, without gate weights. With `partial` it has one row for each of the m
rows: the sum of that row's pairs here times their weights. This is the form of Expert-as-a-Service. It has
fewer bytes and is equal up to rounding.

A barrier call is a request without pairs. Its sender is at the beginning of a step and waits until all are.
It has the number of that step, and so has its answer. See `policy.scheduling.step_barrier`.

A request may have parts: pairs that several servers of one host compute (`experts.relay`). The first part is
that of the server that gets the request, the relay, which passes the other ones on. The pairs of a part stand
together. The answer is that to a request without parts: with `partial` the sums of all servers are added.

    header | experts int32 [p] | rows int32 [p] | weights float32 [p], if partial
           | servers int32 [q] | pairs of each part int32 [q] | hidden float32 [m, h]

Where the rows stay on GPUs (`gpu.ipc.device_calls`), numbers of rows in the memory of the GPU, int32 [m],
take the place of the hidden states.

Question: What goes over the wire in an expert request?
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import DamagedMessage
from moesaic.core.tokens import FloatRows, IntArray

_HEADER = struct.Struct("<4sHBBIIIII")
"""magic, layer, kind, parts, rows, pairs, hidden size, attempt, worker; 28 bytes"""
_MAGIC = b"MOE3"
_STEP = struct.Struct("<Q")
"""The number of a step: behind the header of a barrier call, and at the begin of its answer."""
ROWS_WORD, PAIRS_WORD = 2, 3
"""Words of 4 bytes of the header, in what `header` returns."""
ARRIVAL_BYTES = _HEADER.size + _STEP.size
"""Bytes of a barrier call."""
_EXACT, _PARTIAL, _BARRIER, _BARRIER_WITH_WORK, _GREETING = range(5)
MOST_ROWS = 1 << 22
"""Maximum rows, and maximum pairs, that the header of a request may name. It bounds damaged headers."""
MOST_STEPS = 1 << 62
"""Maximum number of a step. It bounds damaged messages."""
NOT_COMPUTED = 0x7FC0A5A5
"""Every number of an answer's row has these bits, a NaN that no computation gives, if its part could not be
passed on."""


@dataclass(frozen=True)
class Part:
    """The pairs of a request that one server computes."""

    server: int
    pairs: int


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
    """[m, h] hidden states, a view of the message. [0, h] where they are on a GPU."""
    work: bool | None = None
    """Whether the sender of a barrier call has rows to compute. None for every other request."""
    step: int = 0
    """Number of the step of a barrier call. 0 for every other request."""
    worker: int = 0
    """A number of the attention worker that wants the answer, also where a relay sends the request."""
    parts: tuple[Part, ...] = ()
    """Which server computes which pairs, in their order. Empty: the one that gets the request."""
    greeting: bool = False
    """Whether it only says that the sender is a relay."""
    places: IntArray | None = None
    """[m] numbers of the rows in memory of the client's GPU. None: they are in the message."""

    @property
    def answer_rows(self) -> int:
        """Rows of the answer. An answer without content still has one row."""
        rows = self.hidden if self.places is None else self.places
        return max(1, len(self.experts) if self.weights is None else len(rows))

    @property
    def turns(self) -> list[IntArray]:
        """The pairs in turns: first the first pair of each row, then the second one of each, and so on.

        In this order the sums of --combine partial are added up.
        """
        order = np.argsort(self.rows, kind="stable")
        num_before = np.arange(len(order)) - np.searchsorted(self.rows[order], self.rows[order])
        return [order[num_before == turn] for turn in range(int(num_before.max()) + 1)]

    @property
    def slices(self) -> list[slice]:
        """The pairs of each part."""
        ends = np.cumsum([part.pairs for part in self.parts]).tolist()
        return [slice(end - part.pairs, end) for part, end in zip(self.parts, ends, strict=True)]


def size(rows: int, pairs: int, hidden: int, partial: bool, parts: int = 0, on_device: bool = False) -> int:
    """Bytes of a request. on_device: its rows are on a GPU."""
    row = 1 if on_device else hidden
    return _HEADER.size + 4 * pairs * (3 if partial else 2) + 8 * parts + 4 * rows * row


def write(
    memory: memoryview,
    layer: int,
    experts: IntArray,
    rows: IntArray,
    weights: FloatRows | None,
    hidden: FloatRows,
    attempt: int = 0,
    worker: int = 0,
    parts: Sequence[Part] = (),
    places: IntArray | None = None,
) -> None:
    """Write a request into `memory`, which has `size` bytes. The arrays are those of `Request`."""
    (count, width), pairs = hidden.shape, len(experts)
    count = count if places is None else len(places)
    kind = _EXACT if weights is None else _PARTIAL
    _HEADER.pack_into(memory, 0, _MAGIC, layer, kind, len(parts), count, pairs, width, attempt, worker)
    ids = np.frombuffer(memory, np.int32, 2 * pairs, _HEADER.size)
    ids[:pairs], ids[pairs:] = experts, rows
    offset = _HEADER.size + 8 * pairs
    if weights is not None:
        np.frombuffer(memory, np.float32, pairs, offset)[:] = weights
        offset += 4 * pairs
    if parts:
        table = [part.server for part in parts] + [part.pairs for part in parts]
        np.frombuffer(memory, np.int32, len(table), offset)[:] = table
        offset += 4 * len(table)
    if places is None:
        np.frombuffer(memory, np.float32, count * width, offset).reshape(count, width)[:] = hidden
    else:
        np.frombuffer(memory, np.int32, count, offset)[:] = places


def header(layer: int, hidden: int, worker: int) -> npt.NDArray[np.int32]:
    """[w] The header of a request for exact answers, without numbers of rows and pairs.

    A kernel writes those, and behind the header the arrays of a request whose rows are on a GPU.
    """
    memory = bytearray(_HEADER.size)
    _HEADER.pack_into(memory, 0, _MAGIC, layer, _EXACT, 0, 0, 0, hidden, 0, worker)
    return np.frombuffer(memory, np.int32)


def read_counts(memory: memoryview) -> tuple[int, int]:
    """Rows and pairs of the request at the begin of `memory`, as its header says."""
    rows, pairs = _HEADER.unpack_from(memory, 0)[4:6]
    return rows, pairs


def write_arrival(memory: memoryview, hidden: int, work: bool, step: int, worker: int = 0) -> None:
    """Write a barrier call into `memory`, which has ARRIVAL_BYTES."""
    kind = _BARRIER_WITH_WORK if work else _BARRIER
    _HEADER.pack_into(memory, 0, _MAGIC, 0, kind, 0, 0, 0, hidden, 0, worker)
    _STEP.pack_into(memory, _HEADER.size, step)


def write_step_begun(answer: memoryview, step: int) -> None:
    """Write into the answer to a barrier call which step has begun."""
    _STEP.pack_into(answer, 0, step)


def read_step_begun(answer: memoryview) -> int:
    """The number of the step that has begun, by the answer to a barrier call.

    Raises DamagedMessage for a number above MOST_STEPS.
    """
    return _step(answer, 0)


def _step(memory: memoryview, offset: int) -> int:
    step: int = _STEP.unpack_from(memory, offset)[0]
    if step > MOST_STEPS:
        raise DamagedMessage(f"a barrier call is for step {step}, and {MOST_STEPS} is the last one")
    return step


def write_greeting(memory: memoryview, hidden: int) -> None:
    """Write the first request of a relay into `memory`, which has `size(0, 0, hidden, False)` bytes."""
    _HEADER.pack_into(memory, 0, _MAGIC, 0, _GREETING, 0, 0, 0, hidden, 0, 0)


def parse(
    memory: memoryview, num_layers: int, num_experts: int, hidden: int, on_device: int | None = None
) -> Request:
    """The request in `memory`. on_device: so many rows are on a GPU, of which it reads some.

    Raises DamagedMessage when it is no valid request: the peer is not moesaic.
    """
    if len(memory) < _HEADER.size:
        raise DamagedMessage(f"a request of {len(memory)} bytes is too short")
    magic, layer, kind, count, rows, pairs, width, attempt, worker = _HEADER.unpack_from(memory, 0)
    partial = kind == _PARTIAL
    if magic != _MAGIC or kind > _GREETING or layer >= num_layers or width != hidden:
        raise DamagedMessage("a request has a damaged header or is meant for another model")
    if kind >= _BARRIER and (rows or pairs or count):
        raise DamagedMessage(f"a call without pairs claims {rows} rows, {pairs} pairs and {count} parts")
    at_barrier = kind in (_BARRIER, _BARRIER_WITH_WORK)
    is_on_device = on_device is not None
    expected_bytes = ARRIVAL_BYTES if at_barrier else size(rows, pairs, hidden, partial, count, is_on_device)
    if max(rows, pairs) > MOST_ROWS or len(memory) != expected_bytes:
        raise DamagedMessage(f"a request of {len(memory)} bytes claims {rows} rows and {pairs} pairs")
    offset = _HEADER.size
    # Copy the ids, because a hostile client could change shared memory after the checks.
    ids = np.frombuffer(memory, np.int32, 2 * pairs, offset).astype(np.int64)
    experts, places = ids[:pairs], ids[pairs:]
    for name, array, end in (("expert", experts, num_experts), ("row", places, rows)):
        if pairs and array.view(np.uint64).max() >= end:  # negative numbers become huge
            raise DamagedMessage(f"a request names {name} {array.min()} to {array.max()} of {end}")
    offset += 8 * pairs
    weights = np.frombuffer(memory, np.float32, pairs, offset) if partial else None
    offset += 4 * pairs if partial else 0
    parts = _parts(memory, offset, count, pairs)
    named_rows = None if on_device is None else _places(memory, offset + 8 * count, rows, on_device)
    rows_here = 0 if is_on_device else rows
    values = np.frombuffer(memory, np.float32, rows_here * hidden, offset + 8 * count).reshape(
        rows_here, hidden
    )
    work, step = None, 0
    if at_barrier:
        work, step = kind == _BARRIER_WITH_WORK, _step(memory, _HEADER.size)
    fields = layer, attempt, experts, places, weights, values, work, step, worker, parts
    return Request(*fields, greeting=kind == _GREETING, places=named_rows)


def _places(memory: memoryview, offset: int, rows: int, end: int) -> IntArray:
    """The numbers of a request's rows on a GPU, which has `end` rows."""
    row_numbers = np.frombuffer(memory, np.int32, rows, offset).astype(np.int64)
    if rows and row_numbers.view(np.uint64).max() >= end:
        raise DamagedMessage(f"a request reads rows {row_numbers.min()} to {row_numbers.max()} of {end}")
    return row_numbers


def _parts(memory: memoryview, offset: int, count: int, pairs: int) -> tuple[Part, ...]:
    """The parts of a request from byte `offset` on."""
    table = np.frombuffer(memory, np.int32, 2 * count, offset).tolist()
    parts = tuple(map(Part, table[:count], table[count:]))
    covers_pairs = sum(part.pairs for part in parts) == pairs and all(part.pairs > 0 for part in parts)
    distinct = len({part.server for part in parts}) == count and all(part.server >= 0 for part in parts)
    if count and not (covers_pairs and distinct):
        raise DamagedMessage(f"a request of {pairs} pairs has the parts {table}")
    return parts
