"""When the experts' answers are complete: the token pool of Asynchronous Expert Parallelism (section 3.2).

A layer run sends each of its n rows to top_k experts and gets n * top_k *parts* back, in any order: some
twice (sent again to a replica), some late (of a request that was cancelled or preempted). Its rows belong to
*units*, which go on to the next layer as a whole: one row of a decode, or the rows of a chunk of a prompt. A
unit is ready when all parts of all its rows are in.

The paper's key of a token is (request, layer). Ours is (request, epoch, first position, layer), so several
chunks of one request may be under way. The run has a number of its own, its *call*, which is never used twice
and comes back with every part: parts are told apart by (call, pair) alone, and a part of an older epoch
belongs to an older call, whose unit was dropped.

Example: call 0 at layer 3, top_k 2, with one row of request 7 (position 20) and two of request 8 (from
position 0). Pairs 0 and 1 are of request 7, pairs 2 to 5 of request 8.

    arrived(0, [5, 0, 2])   None: request 7 lacks pair 1, request 8 lacks 3 and 4
    arrived(0, [2, 1])      request 7 is ready; 2 was in already
    missing(0)              [3, 4]
    arrived(0, [3, 4])      request 8 is ready; the call is done and forgotten
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Units:
    """u units of one call, as parallel arrays."""

    call: int
    layer: int
    """The layer whose experts were asked."""
    request_ids: IntArray
    """[u]"""
    epochs: IntArray
    """[u] how often each request had been preempted."""
    positions: IntArray
    """[u] of the first row of each, in its sequence."""
    rows: IntArray
    """[u] at least 1."""
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
        """All units of a call, their rows one after another."""
        return cls(call, layer, request_ids, epochs, positions, rows, np.cumsum(rows) - rows)

    def __len__(self) -> int:
        return len(self.request_ids)

    def take(self, indices: IntArray) -> Units:
        """[r] some of them."""
        return replace(
            self,
            request_ids=self.request_ids[indices],
            epochs=self.epochs[indices],
            positions=self.positions[indices],
            rows=self.rows[indices],
            starts=self.starts[indices],
        )


class _Call:
    """What a call still waits for."""

    __slots__ = ("dropped", "lacking", "num_out", "out", "top_k", "units")

    def __init__(self, units: Units, top_k: int) -> None:
        self.units = units
        self.lacking: IntArray = units.rows * top_k
        """[u] parts that each unit lacks."""
        self.dropped: Mask = np.zeros(len(units), dtype=bool)
        """[u]"""
        self.top_k = top_k
        self.num_out = int(units.rows.sum()) * top_k
        self.out: Mask = np.ones(self.num_out, dtype=bool)
        """[p] True while the part is out."""

    @property
    def waiting(self) -> Mask:
        """[u] units that will be ready one day."""
        return (self.lacking > 0) & ~self.dropped

    def receive(self, pairs: IntArray) -> IntArray:
        """[r] indices of the units that these parts complete, ascending."""
        fresh: Mask = np.zeros(len(self.out), dtype=bool)
        fresh[pairs] = True
        fresh &= self.out
        self.out ^= fresh
        self.num_out -= int(np.count_nonzero(fresh))
        waited = self.waiting
        if not self.num_out:
            self.lacking[:] = 0
            return np.flatnonzero(waited)
        units = np.repeat(np.arange(len(self.units)), self.units.rows * self.top_k)
        self.lacking -= np.bincount(units[fresh], minlength=len(self.lacking))
        return np.flatnonzero(waited & (self.lacking == 0))


class TokenPool:
    """The calls that wait for parts. Each unit is handed out once, or dropped.

    A call costs O(its pairs), whatever arrives: no work is done per row in Python.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        """In order of their numbers; those answered in full are not in it."""
        self._last = -1

    def __len__(self) -> int:
        """Calls that are not done."""
        return len(self._calls)

    def open(self, units: Units, top_k: int) -> None:
        """The call waits for pairs 0 : n * top_k from now on; pair = row * top_k + rank.

        `units` are all of the call (Units.of_run). Raises ValueError when the call's number is not above
        all before it, or a unit has no row.
        """
        if units.call <= self._last:
            raise ValueError(f"call {units.call} comes after call {self._last}: numbers must grow")
        if top_k < 1 or not len(units) or units.rows.min() < 1:
            raise ValueError(f"call {units.call}: every unit waits for at least one part")
        self._last = units.call
        self._calls[units.call] = _Call(units, top_k)

    def arrived(self, call: int, pairs: IntArray) -> Units | None:
        """The units that these parts complete, in the order of the call; None when there are none.

        pairs: [a] in any order. Those that were in already are ignored, and so is every part of a call that
        is done. Raises ValueError for a call that was never opened and for a pair that it does not have.
        """
        record = self._find(call)
        if record is None or not len(pairs):
            return None
        if pairs.min() < 0 or pairs.max() >= len(record.out):
            raise ValueError(f"call {call} has pairs 0 to {len(record.out) - 1}: got {pairs.tolist()}")
        ready = record.receive(pairs)
        if not record.num_out:
            del self._calls[call]
        if len(ready) == len(record.units):
            return record.units
        return record.units.take(ready) if len(ready) else None

    def drop(self, request_id: int) -> None:
        """The request was cancelled or preempted: none of its units that wait will ever be ready.

        Their parts are still awaited, since they may be on their way into the call's memory. Units that
        the request opens afterwards, in its next epoch, are not touched.
        """
        for record in self._calls.values():
            record.dropped |= record.units.request_ids == request_id

    def done(self, call: int) -> bool:
        """True once every part came, those of dropped units too: the call's memory may be released."""
        return self._find(call) is None

    def missing(self, call: int) -> IntArray:
        """[m] pairs still out, ascending: what to send again when a server died.

        Those of dropped units are among them: an answer to each is what makes the call done.
        """
        record = self._find(call)
        return np.zeros(0, dtype=np.int64) if record is None else np.flatnonzero(record.out)

    def waiting(self) -> dict[int, int]:
        """Layer -> rows of the units that wait for parts; layers with none are left out."""
        rows: dict[int, int] = {}
        for record in self._calls.values():
            waiting = int(record.units.rows[record.waiting].sum())
            if waiting:
                rows[record.units.layer] = rows.get(record.units.layer, 0) + waiting
        return rows

    def _find(self, call: int) -> _Call | None:
        """None when it is done."""
        if call > self._last:
            raise ValueError(f"call {call} was never opened")
        return self._calls.get(call)
