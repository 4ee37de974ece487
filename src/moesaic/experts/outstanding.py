"""What a client of expert servers keeps while their answers are out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from moesaic.core.experts import ServerEntry
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts.client import RequestHandle
from moesaic.kernels.table import Put
from moesaic.policy.fleet.replicas import ReplicaStats
from moesaic.transport.calls import Call, Caller


@lru_cache(maxsize=64)
def every_pair(pairs: int, top_k: int) -> tuple[IntArray, IntArray]:
    """All pairs of a submission [p], and the row of each. Kept: not to be written."""
    found = np.arange(pairs)
    rows: IntArray = found // top_k
    found.flags.writeable = rows.flags.writeable = False
    return found, rows


@dataclass(eq=False)
class Submission:
    """Rows whose experts were asked."""

    handle: RequestHandle
    layer: int
    hidden: FloatRows
    """[n, h]"""
    experts: IntArray
    """[n * k] the expert of each pair."""
    scores: FloatRows | None
    """[n * k] the gate weight of each pair, where partial sums are wanted."""
    top_k: int
    out: FloatRows | None = None
    """[n * k, h] what is there of the answer: where it came in, if one call brought all of it, else in memory
    of its own; None: nothing is there yet."""
    inside: Call | None = None
    """In whose memory `out` is."""
    give_back: Callable[[], None] | None = None
    """Whatever `out` lies in; of an answer that is where it came in, from `Sent.done` on."""
    missing: int = field(init=False)
    """Pairs that are not there yet, and empty calls that were not answered."""
    unsent: list[IntArray] = field(default_factory=list)
    """Pairs that nobody could take."""
    attempt: int = 0
    released: bool = False
    """Nobody waits for it any more."""

    def __post_init__(self) -> None:
        self.missing = len(self.experts)

    def room(self, memory: Memory) -> FloatRows:
        """`out`, for answers that come one after the other."""
        if self.out is None:
            kept, self.out = memory.take(len(self.experts), self.hidden.shape[1])
            self.give_back = partial(memory.give_back, kept)
        return self.out

    def move(self, memory: Memory) -> bool:
        """Put an answer elsewhere that is where it came in: room is needed there. False: it is not there."""
        if self.inside is None or self.out is None or self.give_back is None:
            return False
        answer, give_back, self.out, self.inside = self.out, self.give_back, None, None
        self.room(memory)[:] = answer
        give_back()
        return True

    def release(self) -> None:
        """Nobody looks at the answer any more; what is late is for nobody."""
        self.released = True
        if self.give_back is not None:
            self.give_back()
        self.out = self.inside = self.give_back = None

    def scores_of(self, pairs: IntArray) -> FloatRows | None:
        """[p]"""
        return None if self.scores is None else self.scores[pairs]

    def rows_of(self, pairs: IntArray) -> tuple[FloatRows, IntArray]:
        """The rows [m, h] that these pairs need, each once, and which of them each pair needs [p]."""
        if len(pairs) == len(self.experts):
            return self.hidden, every_pair(len(pairs), self.top_k)[1]
        row_of = pairs // self.top_k
        used = np.zeros(len(self.hidden), dtype=bool)
        used[row_of] = True
        places: IntArray = (np.cumsum(used) - 1)[row_of]
        return self.hidden[used], places


@dataclass(eq=False, slots=True)
class Sent:
    """A call under way: which pairs of which submission it asks for."""

    submission: Submission
    pairs: IntArray
    """[p] ascending; none in an empty call, whose answer is one row that means nothing."""
    call: Call
    version: int
    """Of the directory that it was routed by."""
    left: int = field(init=False)
    """Pairs that are not there yet; 1 for the answer to an empty call."""
    _arrived: npt.NDArray[np.bool_] | None = None
    """[p] whether each is there, once some are."""

    def __post_init__(self) -> None:
        self.left = max(1, len(self.pairs))

    @property
    def _answer(self) -> FloatRows:
        """[rows, h]"""
        width = self.submission.hidden.shape[1]
        return np.frombuffer(self.call.answer, dtype=np.float32).reshape(-1, width)

    def receive(self, indices: IntArray, memory: Memory) -> tuple[IntArray, int]:
        """Put these rows of the answer, which are there now, in their places.

        Returns their pairs, and how many of them are there for the first time: a transport may repeat itself.
        """
        fresh, submission = self._mark(indices), self.submission
        if not len(self.pairs) or submission.released:
            return self.pairs[:0], fresh
        if submission.out is None and fresh == len(submission.experts):
            # The usual case: all of it at once. It stays where it is.
            submission.out, submission.inside = self._answer, self.call
            return self.pairs, fresh
        pairs = self.pairs[indices]
        memory.put(submission.room(memory), pairs, self._answer, indices)
        return pairs, fresh

    def done(self, release: Callable[[Call], None]) -> None:
        """The last row is there: the transport may have its memory back once nobody looks at it."""
        if self.submission.inside is self.call:
            self.submission.give_back = partial(release, self.call)
        else:
            release(self.call)

    def _mark(self, places: IntArray) -> int:
        """These of the pairs are there; how many of them were not before."""
        if self._arrived is None:
            if len(places) == self.left:  # `places` names each once
                self.left = 0
                return len(places)
            self._arrived = np.zeros(self.left, dtype=bool)
        self._arrived[places] = True
        before, self.left = self.left, int(np.count_nonzero(~self._arrived))
        return before - self.left

    @property
    def missing(self) -> IntArray:
        """The pairs that are not there yet, of a call that is under way."""
        return self.pairs if self._arrived is None else self.pairs[~self._arrived]


class Summed(Sent):
    """A call whose answer has the partial sum of each row's pairs."""

    def receive(self, indices: IntArray, memory: Memory) -> tuple[IntArray, int]:
        """A sum stands at the first of its pairs, zeros at the others."""
        _, first, row_of = np.unique(
            self.pairs // self.submission.top_k, return_index=True, return_inverse=True
        )
        told = np.flatnonzero(np.isin(row_of, indices))
        pairs, fresh = self.pairs[told], self._mark(told)
        if self.submission.released:
            return pairs[:0], fresh
        out = self.submission.room(memory)
        out[pairs] = 0
        memory.put(out, self.pairs[first[indices]], self._answer, indices)
        return pairs, fresh


@dataclass
class End:
    """A connection to a server and the calls on it."""

    entry: ServerEntry
    caller: Caller
    calls: dict[int, Sent] = field(default_factory=dict)
    barrier_calls: set[int] = field(default_factory=set)
    """Numbers of the calls that are knocks."""

    @property
    def outstanding(self) -> int:
        return sum(sent.left for sent in self.calls.values() if len(sent.pairs))


class Posted:
    """What was sent so far."""

    def __init__(self, layers: tuple[int, ...], own: int | None) -> None:
        """layers: with routed experts. own: the server of this client's own rank."""
        self._own = own
        self._calls = 0
        self._remote_bytes = 0
        self._pairs = dict.fromkeys(layers, 0)
        self._local = dict.fromkeys(layers, 0)

    def add(self, layer: int, server: int, pairs: int, size: int) -> None:
        """A call with so many (row, expert) pairs, and bytes of question and answer, went to `server`."""
        self._calls += 1
        self._pairs[layer] += pairs
        if server == self._own:
            self._local[layer] += pairs
        else:
            self._remote_bytes += size

    def stats(self, waiting_seconds: float, failures: ReplicaStats) -> ExpertStats:
        """A snapshot of all that a client counts."""
        return ExpertStats(
            calls=self._calls,
            pairs=sum(self._pairs.values()),
            waiting_seconds=waiting_seconds,
            layer_pairs=tuple(self._pairs.values()),
            remote_bytes=self._remote_bytes,
            local_pairs=() if self._own is None else tuple(self._local.values()),
            **vars(failures),
        )


class Memory:
    """Keeps the memory of answers for later ones: the system pages fresh memory in anew."""

    def __init__(self, put: Put) -> None:
        self.put = put
        self._free: list[FloatRows] = []

    def take(self, rows: int, width: int) -> tuple[FloatRows, FloatRows]:
        """Memory to be given back one day, and [rows, width] in it."""
        numbers = rows * width
        fitting = next((memory for memory in self._free if len(memory) >= numbers), None)
        if fitting is None:
            self._free.clear()
            fitting = np.empty(numbers, dtype=np.float32)
        else:
            self._free = [memory for memory in self._free if memory is not fitting]
        return fitting, fitting[:numbers].reshape(rows, width)

    def give_back(self, memory: FloatRows) -> None:
        """Nobody looks at it any more."""
        self._free.append(memory)
