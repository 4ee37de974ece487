"""The token pool of Asynchronous Expert Parallelism (section 3.2): when are the experts' answers complete?

A run of one layer sends each of its n rows to top_k experts and gets n * top_k *parts* back, in any order. A
part may come twice, when it was sent again to a replica. It may also come late, after its request was
cancelled or preempted. The rows belong to *units*, each of which enters the next layer as a whole. A unit is
one row of a decode, or the rows of a prompt chunk. It is ready when all parts of all its rows are here.

The paper identifies a token by (request, layer). We use (request, epoch, first position, layer), so that
several chunks of one request may be in flight. Each run also has a number, its *call*. It is never used twice
and comes back with every part, so (call, pair) alone identifies a part. A part of an older epoch belongs to
an older call, whose unit was dropped.

Example: call 0 at layer 3, top_k 2, with one row of request 7 (position 20) and two of request 8 (from
position 0). Pairs 0 and 1 belong to request 7, pairs 2 to 5 to request 8.

    arrived(0, [5, 0, 2])   None: request 7 lacks pair 1, request 8 lacks 3 and 4
    arrived(0, [2, 1])      request 7 is ready; pair 2 had arrived before
    missing(0)              [3, 4]
    arrived(0, [3, 4])      request 8 is ready; the call is done and removed
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

Mask = npt.NDArray[np.bool_]
NO_UNITS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Units:
    """The u units of one call, as parallel arrays."""

    call: int
    layer: int
    """The layer whose experts compute the rows."""
    request_ids: IntArray
    """[u] request of each unit."""
    epochs: IntArray
    """[u] how often each request had been preempted."""
    positions: IntArray
    """[u] position of each unit's first row in its sequence."""
    rows: IntArray
    """[u] rows of each unit, at least 1."""
    starts: IntArray
    """[u] index of each unit's first row among the rows of the call."""

    @classmethod
    def of_run(
        cls,
        call: int,
        layer: int,
        request_ids: IntArray,
        epochs: IntArray,
        positions: IntArray,
        rows: IntArray,
    ) -> Units:
        """All units of a call, whose rows follow one another in the given order."""
        return cls(call, layer, request_ids, epochs, positions, rows, np.cumsum(rows) - rows)

    def __len__(self) -> int:
        return len(self.request_ids)

    def take(self, indices: IntArray) -> Units:
        """The units at `indices` [r]."""
        return replace(
            self,
            request_ids=self.request_ids[indices],
            epochs=self.epochs[indices],
            positions=self.positions[indices],
            rows=self.rows[indices],
            starts=self.starts[indices],
        )


class _Call:
    """The parts that a call still waits for."""

    __slots__ = (
        *(
            "has_dropped_units",
            "dropped_units",
            "lacking",
            "num_missing",
            "offsets",
            "is_missing",
            "parts",
            "top_k",
            "total",
        ),
        "units",
    )

    def __init__(self, units: Units, top_k: int, previous_call: _Call | None) -> None:
        """previous_call: another call. What follows from units of the same sizes is taken over from it."""
        self.units = units
        self.top_k = top_k
        if previous_call is None or not previous_call.has_sizes_of(units, top_k):
            # A unit without parts would never become ready.
            if top_k < 1 or not len(units) or units.rows.min() < 1:
                raise ValueError(f"call {units.call}: every unit waits for at least one part")
            self.parts: IntArray = units.rows * top_k
            """[u] parts of each unit."""
            self.offsets: IntArray = units.starts * top_k
            """[u] the first pair of each unit."""
            self.total = int(self.parts.sum())
        else:
            self.parts, self.offsets, self.total = (
                previous_call.parts,
                previous_call.offsets,
                previous_call.total,
            )
        self.lacking: IntArray = self.parts.copy()
        """[u] how many parts each unit still waits for."""
        self.dropped_units: Mask = np.zeros(len(units), dtype=bool)
        """[u] whether the unit was dropped."""
        self.has_dropped_units = False
        self.num_missing = self.total
        self.is_missing: Mask = np.ones(self.num_missing, dtype=bool)
        """[p] True until the part has arrived."""

    def has_sizes_of(self, units: Units, top_k: int) -> bool:
        """Whether the units of this call have the very arrays of sizes that these have."""
        own_units = self.units
        return own_units.rows is units.rows and own_units.starts is units.starts and self.top_k == top_k

    @property
    def waiting(self) -> Mask:
        """[u] whether the unit still waits for parts and was not dropped."""
        return (self.lacking > 0) & ~self.dropped_units

    def receive(self, pairs: IntArray) -> IntArray:
        """Record these parts. Returns the [r] indices of the units that they complete, ascending."""
        fresh: Mask = np.zeros(len(self.is_missing), dtype=bool)
        fresh[pairs] = True
        fresh &= self.is_missing
        self.num_missing -= int(np.count_nonzero(fresh))
        if not self.num_missing:
            waiting_units = self.waiting
            self.lacking[:] = 0
            self.is_missing[:] = False
            return waiting_units.nonzero()[0]
        self.is_missing ^= fresh
        num_received = np.add.reduceat(fresh, self.offsets, dtype=np.int64)
        self.lacking -= num_received
        complete: Mask = (self.lacking == 0) & (num_received > 0)
        return (complete & ~self.dropped_units if self.has_dropped_units else complete).nonzero()[0]


class TokenPool:
    """The calls that wait for parts. Each unit is returned once as complete, or dropped.

    A call costs O(its pairs), however they arrive. There is no Python loop over rows.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        """Calls that still wait for parts, in order of their numbers."""
        self._last = -1
        self._newest: _Call | None = None

    def __len__(self) -> int:
        """Number of calls that are not done."""
        return len(self._calls)

    def open(self, units: Units, top_k: int) -> None:
        """Start to wait for the pairs 0 : n * top_k of a call, where pair = row * top_k + slot.

        `units` are all units of the call (Units.of_run). Raises ValueError when the call's number is not
        above all numbers before, or when a unit has no row.
        """
        if units.call <= self._last:
            raise ValueError(f"call {units.call} comes after call {self._last}: numbers must grow")
        self._newest = _Call(units, top_k, self._newest)
        self._last = units.call
        self._calls[units.call] = self._newest

    def receive_units(self, call: int, pairs: IntArray) -> Units | None:
        """Record parts of a call. Returns the units that they complete, in order, or None when there are
        none.

        pairs: [a] in any order. Pairs that arrived before are ignored, and so is every part of a call that is
        done. Raises ValueError for a call that was never opened and for a pair that the call does not have.
        """
        record = self._find(call)
        ready = self.receive(call, pairs)
        if record is None or not len(ready):
            return None
        return record.units if len(ready) == len(record.units) else record.units.take(ready)

    def receive(self, call: int, pairs: IntArray) -> IntArray:
        """Like `receive_units`, but returns the [r] indices of the completed units, ascending."""
        record = self._find(call)
        if record is None or not len(pairs):
            return NO_UNITS
        if pairs.astype(np.uint64).max() >= len(record.is_missing):  # a negative number becomes a large one
            raise ValueError(f"call {call} has pairs 0 to {len(record.is_missing) - 1}: got {pairs.tolist()}")
        ready = record.receive(pairs)
        if not record.num_missing:
            del self._calls[call]
        return ready

    def completes(self, call: int, pairs: IntArray) -> bool:
        """Whether these are all parts of the call that have not arrived. They are not recorded."""
        record = self._find(call)
        if record is None or len(pairs) < record.num_missing:
            return False
        is_received: Mask = np.zeros(len(record.is_missing), dtype=bool)
        is_received[pairs] = True
        return int(np.count_nonzero(is_received & record.is_missing)) == record.num_missing

    def finish(self, call: int) -> IntArray:
        """Record all parts of a call that have not arrived. Returns what `completed` returns."""
        record = self._calls.pop(call)
        return (record.waiting if record.has_dropped_units else record.lacking > 0).nonzero()[0]

    def lacking(self, call: int) -> int:
        """Number of parts of a call that have not arrived."""
        record = self._find(call)
        return 0 if record is None else record.num_missing

    def drop(self, request_id: int) -> None:
        """Drop all waiting units of a request that was cancelled or preempted. They never become ready.

        The pool still waits for their parts, which may yet be written into the call's memory. Units that the
        request opens later, in its next epoch, are not affected.
        """
        for record in self._calls.values():
            record.dropped_units |= record.units.request_ids == request_id
            record.has_dropped_units = True

    def is_complete(self, call: int) -> bool:
        """Whether every part arrived, also those of dropped units. Then the call's memory may be released."""
        return self._find(call) is None

    def missing(self, call: int) -> IntArray:
        """[m] pairs that have not arrived, ascending. They must be sent again when a server died.

        Pairs of dropped units are included, because the call is done only when every pair was answered.
        """
        record = self._find(call)
        return np.zeros(0, dtype=np.int64) if record is None else np.flatnonzero(record.is_missing)

    def waiting(self) -> dict[int, int]:
        """Rows of the units that wait for parts, by layer. Layers without any are left out."""
        rows: dict[int, int] = {}
        for record in self._calls.values():
            waiting = int(record.units.rows[record.waiting].sum())
            if waiting:
                rows[record.units.layer] = rows.get(record.units.layer, 0) + waiting
        return rows

    def _find(self, call: int) -> _Call | None:
        """The call, or None when it is done. Raises ValueError when it was never opened."""
        if call > self._last:
            raise ValueError(f"call {call} was never opened")
        return self._calls.get(call)
