"""What a client of expert servers keeps while their answers are on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.experts import ServerEntry
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts import wire
from moesaic.experts.client import RequestHandle, RowPlace
from moesaic.kernels.table import Put
from moesaic.policy.fleet.replicas import Replicas, ReplicaStats
from moesaic.transport.calls import Call, Caller


@lru_cache(maxsize=64)
def every_pair(pairs: int, top_k: int) -> tuple[IntArray, IntArray]:
    """All pairs of a submission [p], and the row of each. The arrays are cached and read-only."""
    pairs_array = np.arange(pairs)
    rows: IntArray = pairs_array // top_k
    # All callers share the cached arrays, so nobody may write into them.
    pairs_array.flags.writeable = rows.flags.writeable = False
    return pairs_array, rows


@dataclass(eq=False)
class Submission:
    """A request to the experts of a layer, and as much of its answer as has come in."""

    handle: RequestHandle
    layer: int
    hidden: Any
    """[n, h] float32: an array, or a tensor on the GPU where the rows stay there."""
    experts: IntArray
    """[n * k] the expert of each pair."""
    gate_weights: FloatRows | None
    """[n * k] the gate weight of each pair, where partial sums are wanted."""
    top_k: int
    answer: Any | None = None
    """[n * k, h] the answer so far, or None before the first part of it.

    Where one call brings the whole answer it stays in the call's memory. Otherwise it is in memory of its
    own.
    """
    answer_call: Call | None = None
    """The call whose memory has `out`."""
    give_back: Callable[[], None] | None = None
    """Frees the memory of `out`. Where that is a call's memory, it is set when the call is complete."""
    num_missing: int = field(init=False)
    """Pairs and empty calls without an answer."""
    has_empty_calls: bool = False
    """Some server got an empty call. Then nothing is reported before the whole answer is here."""
    unsent_pairs: list[IntArray] = field(default_factory=list)
    """Pairs that no server could take yet."""
    attempt: int = 0
    """How often pairs of it were sent again."""
    has_blamed_server: bool = False
    """A server was given up for its answer."""
    is_released: bool = False
    """The answer is no longer needed."""
    servers: IntArray | None = None
    """[n * k] whose answer was taken for each pair, -1 before. None: nobody wants to know."""
    place: RowPlace | None = None
    """Where servers read the rows on the GPU. None: the rows are sent."""

    def __post_init__(self) -> None:
        self.num_missing = len(self.experts)

    def answer_memory(self, memory: AnswerMemory) -> Any:
        """`out`, allocated for answers that come in several parts."""
        if self.answer is None:
            block, self.answer = memory.take(len(self.experts), self.hidden.shape[1])
            self.give_back = partial(memory.give_back, block)
        return self.answer

    def move(self, memory: AnswerMemory) -> bool:
        """Copy an answer out of its call's memory, which others need. Returns False if it is not there."""
        # Without `give_back` the call is not complete, and its server may still write into its memory.
        if self.answer_call is None or self.answer is None or self.give_back is None:
            return False
        answer, give_back, self.answer, self.answer_call = self.answer, self.give_back, None, None
        memory.copy(self.answer_memory(memory), answer)
        give_back()
        return True

    def release(self) -> None:
        """The answer is no longer needed. Parts that come in later are ignored."""
        self.is_released = True
        if self.give_back is not None:
            self.give_back()
        self.answer = self.answer_call = self.give_back = None

    def gate_weights_of(self, pairs: IntArray) -> FloatRows | None:
        """[p] the gate weights of these pairs."""
        return None if self.gate_weights is None else self.gate_weights[pairs]

    def rows_of(self, pairs: IntArray) -> tuple[IntArray | None, IntArray]:
        """The distinct rows [m] that these pairs need, and which of them each pair needs [p].

        None: they need all rows.
        """
        if len(pairs) == len(self.experts):
            return None, every_pair(len(pairs), self.top_k)[1]
        row_of = pairs // self.top_k
        is_used = np.zeros(len(self.hidden), dtype=bool)
        is_used[row_of] = True
        index: IntArray = (np.cumsum(is_used) - 1)[row_of]
        return np.flatnonzero(is_used), index

    def row(self, number: int) -> FloatRows:
        """[h] one row, on the host. From a GPU the host waits for it."""
        row: FloatRows = self.hidden[number] if self.place is None else self.hidden[number].cpu().numpy()
        return row


@dataclass(eq=False, slots=True)
class OpenCall:
    """A call under way and the pairs of a submission that it computes."""

    submission: Submission
    pairs: IntArray
    """[p] ascending. An empty call has none; its answer is one row without meaning."""
    call: Call
    version: int
    """Version of the directory that it was routed by."""
    num_missing: int = field(init=False)
    """Pairs without an answer; 1 for an empty call without an answer."""
    _answered_mask: npt.NDArray[np.bool_] | None = None
    """[p] whether each pair has its answer. None before the first part of the answer."""
    relayed_call: RelayedCall | None = None
    """The call that this one is a part of, if another server passes it on or sends further parts with it."""

    def __post_init__(self) -> None:
        self.num_missing = max(1, len(self.pairs))

    @property
    def _width(self) -> int:
        return int(self.submission.hidden.shape[1])

    def receive(self, indices: IntArray, memory: AnswerMemory) -> tuple[IntArray, int]:
        """Store these rows of the call's answer in the submission's answer.

        Returns their pairs, and how many of them are new: a transport may repeat itself.
        """
        fresh, submission = self._mark(indices), self.submission
        if not len(self.pairs) or submission.is_released:
            return self.pairs[:0], fresh
        if submission.answer is None and fresh == len(submission.experts):
            # The usual case: the whole answer comes at once. It stays in the call's memory.
            submission.answer, submission.answer_call = memory.answer(self.call, self._width), self.call
            return self.pairs, fresh
        pairs = self.pairs[indices]
        answer = memory.answer(self.call, self._width)
        memory.put(submission.answer_memory(memory), pairs, answer, indices)
        return pairs, fresh

    def find_nonfinite_row(self, indices: IntArray) -> tuple[int, IntArray] | None:
        """A row of these rows of the answer that has NaN or infinities, though its hidden state is finite.

        Returns the row of the submission, and the experts whose answers are in it. None: there is no such
        row.
        """
        if not len(self.pairs) or self.submission.is_released:
            return None
        for index in self._select_nonfinite(indices):
            pairs = self._pairs_of(int(index))
            row = int(pairs[0]) // self.submission.top_k
            if np.isfinite(self.submission.row(row)).all():
                return row, self.submission.experts[pairs]
        return None

    def _select_nonfinite(self, indices: IntArray) -> IntArray:
        """The rows among `indices` of the answer that have NaN or infinities.

        Where rows stay on GPUs the server says it of each row, so that the host need not wait for its own.
        """
        if self.submission.place is not None:
            flags = np.frombuffer(self.call.answer, np.uint8)
            nonfinite: IntArray = indices[flags[indices] == 0]
            return nonfinite
        answer = np.frombuffer(self.call.answer, dtype=np.float32).reshape(-1, self._width)
        # All rows of an answer are checked in place, without a copy.
        rows = answer[indices] if len(indices) < len(answer) else answer
        if np.isfinite(rows).all():
            return indices[:0]
        return indices[~np.isfinite(answer[indices]).all(axis=1)]

    def _pairs_of(self, index: int) -> IntArray:
        """The pairs whose results are in this row of the answer."""
        return self.pairs[index : index + 1]

    def complete(self, release: Callable[[Call], None]) -> None:
        """The last row has come in.

        `release` frees the call's memory. It is called when the answer is no longer needed there.
        """
        if self.relayed_call is not None:
            self.relayed_call.end(self)
        elif self.submission.answer_call is self.call:
            self.submission.give_back = partial(release, self.call)
        else:
            release(self.call)

    def _mark(self, indices: IntArray) -> int:
        """These of the call's pairs have their answer. Returns how many of them had none before."""
        if self._answered_mask is None:
            if len(indices) == self.num_missing:  # `indices` has no duplicates
                self.num_missing = 0
                return len(indices)
            self._answered_mask = np.zeros(self.num_missing, dtype=bool)
        self._answered_mask[indices] = True
        num_missing_before, self.num_missing = self.num_missing, int(np.count_nonzero(~self._answered_mask))
        return num_missing_before - self.num_missing

    @property
    def missing_pairs(self) -> IntArray:
        """The pairs without an answer, of a call under way."""
        return self.pairs if self._answered_mask is None else self.pairs[~self._answered_mask]


@dataclass(eq=False)
class RelayedPart:
    """A part of a call that is under way."""

    server: int
    call: OpenCall
    first: int
    """The first row of the part in the whole answer."""
    is_live: bool = True
    """Whether its answer is awaited."""


@dataclass(eq=False)
class RelayedCall:
    """A call with parts. `call` is that of the connection to the relay."""

    relay: int
    host: str
    call: Call
    hidden: FloatRows
    """[m, h] the rows that were sent."""
    release: Callable[[Call], None]
    is_sum: bool
    parts: list[RelayedPart]
    is_closed: bool = False
    """Whether the connection to the relay is closed."""
    _num_received: int = 0
    """Rows of the answer so far."""

    @property
    def size(self) -> int:
        """Bytes of the request and the answer."""
        return len(self.call.request) + self.call.rows * self.call.row_bytes

    @property
    def live_parts(self) -> list[RelayedPart]:
        """The parts whose answers are awaited."""
        return [part for part in self.parts if part.is_live]

    def end(self, call: OpenCall) -> None:
        """This part is complete, or it is taken back."""
        for part in self.parts:
            part.is_live &= part.call is not call
        if not self.live_parts and not self.is_closed:
            self.is_closed = True
            self.release(self.call)

    def split_rows(self, indices: IntArray) -> list[tuple[RelayedPart, IntArray]]:
        """The parts of which these rows of the whole answer are, with the rows of each. Sums come at once."""
        self._num_received += len(indices)
        if self.is_sum:
            return (
                [(part, indices) for part in self.live_parts] if self._num_received == self.call.rows else []
            )
        rows_of_parts = []
        for part in self.live_parts:
            rows = indices - part.first
            rows = rows[(rows >= 0) & (rows < part.call.call.rows)]
            if len(rows):
                rows_of_parts.append((part, rows))
        return rows_of_parts

    def select_computed(self, part: RelayedPart, rows: IntArray) -> IntArray:
        """The rows of the part that were computed. If the rows are sums, all or none were."""
        answer = np.frombuffer(part.call.call.answer, np.float32).reshape(-1, self.hidden.shape[1])
        is_refused = answer.view(np.uint32)[rows, 0] == wire.NOT_COMPUTED
        if is_refused.any():
            is_refused[is_refused] = (answer.view(np.uint32)[rows[is_refused]] == wire.NOT_COMPUTED).all(
                axis=1
            )
        if not self.is_sum:
            computed_rows: IntArray = rows[~is_refused]
            return computed_rows
        wrong = ~np.isfinite(answer).all(axis=1) & np.isfinite(self.hidden).all(axis=1)
        return rows[:0] if is_refused.any() or wrong.any() else rows


class PartialSumCall(OpenCall):
    """A call whose answer is the partial sum of each row's pairs."""

    def _pairs_of(self, index: int) -> IntArray:
        rows = self.pairs // self.submission.top_k
        pairs: IntArray = self.pairs[rows == np.unique(rows)[index]]
        return pairs

    def receive(self, indices: IntArray, memory: AnswerMemory) -> tuple[IntArray, int]:
        """Store a row's sum at the first of its pairs, and zeros at the others."""
        _, first, row_of = np.unique(
            self.pairs // self.submission.top_k, return_index=True, return_inverse=True
        )
        answered_pairs = np.flatnonzero(np.isin(row_of, indices))
        pairs, fresh = self.pairs[answered_pairs], self._mark(answered_pairs)
        if self.submission.is_released:
            return pairs[:0], fresh
        target = self.submission.answer_memory(memory)
        memory.clear(target, pairs)
        memory.put(target, self.pairs[first[indices]], memory.answer(self.call, self._width), indices)
        return pairs, fresh


@dataclass
class ServerConnection:
    """A connection to a server and the calls on it."""

    entry: ServerEntry
    caller: Caller
    calls: dict[int, OpenCall] = field(default_factory=dict)
    """The calls without a complete answer, by their numbers."""
    relayed_calls: dict[int, RelayedCall] = field(default_factory=dict)
    """Calls whose parts this server passes on, by their numbers. Each part is among `calls` of its server."""
    barrier_calls: set[int] = field(default_factory=set)
    """Numbers of the calls that arrive at the server's barrier."""

    def end(self, call: Call) -> None:
        """A call of `relayed` is over."""
        del self.relayed_calls[call.number]
        self.caller.release(call)

    @property
    def num_missing_pairs(self) -> int:
        """Pairs without an answer."""
        return sum(call.num_missing for call in self.calls.values() if len(call.pairs))


class CallCounts:
    """Counts what a client has sent."""

    def __init__(self, layers: tuple[int, ...], replicas: Replicas) -> None:
        """layers: with routed experts. replicas: knows the own rank's server, and which servers are far."""
        self._replicas, self._own_server = replicas, replicas.own_server
        self._calls = 0
        self._remote_bytes = self._far_bytes = 0
        self._pairs = dict.fromkeys(layers, 0)
        self._local = dict.fromkeys(layers, 0)

    def add(self, layer: int, server: int, pairs: int, size: int) -> None:
        """A call with so many (row, expert) pairs was sent to `server`. size: bytes of request and answer."""
        self._calls += 1
        self._pairs[layer] += pairs
        if server == self._own_server:
            self._local[layer] += pairs
        else:
            self._remote_bytes += size
            self._far_bytes += size if self._replicas.far(server) else 0

    def stats(self, waiting_seconds: float, failures: ReplicaStats) -> ExpertStats:
        """A snapshot of all that a client counts."""
        return ExpertStats(
            calls=self._calls,
            pairs=sum(self._pairs.values()),
            waiting_seconds=waiting_seconds,
            layer_pairs=tuple(self._pairs.values()),
            remote_bytes=self._remote_bytes,
            far_bytes=self._far_bytes,
            local_pairs=() if self._own_server is None else tuple(self._local.values()),
            **vars(failures),
        )


class AnswerMemory(Protocol):
    """Where answers are put together: arrays of the host, or tensors of a GPU."""

    def take(self, rows: int, width: int) -> tuple[Any, Any]:
        """Memory for `give_back`, and an array or tensor [rows, width] in it."""
        ...

    def give_back(self, memory: Any) -> None:
        """The memory may be used again."""
        ...

    def answer(self, call: Call, width: int) -> Any:
        """[rows, width] the answer of a call, in its own memory."""
        ...

    def put(self, target: Any, target_rows: IntArray, source: Any, source_rows: IntArray) -> None:
        """out[lines] = rows[places]."""
        ...

    def clear(self, target: Any, target_rows: IntArray) -> None:
        """out[lines] = 0."""
        ...

    def copy(self, target: Any, answer: Any) -> None:
        """out[:] = answer."""
        ...


class HostAnswers:
    """The AnswerMemory of the host. It keeps memory for later answers: fresh memory would be paged in."""

    def __init__(self, put: Put) -> None:
        self.put = put
        self._free: list[FloatRows] = []

    def take(self, rows: int, width: int) -> tuple[FloatRows, FloatRows]:
        """Memory for `give_back`, and an array [rows, width] in it."""
        numbers = rows * width
        fitting = next((memory for memory in self._free if len(memory) >= numbers), None)
        if fitting is None:
            # Blocks that are too small go, so that memory does not grow with each new size of an answer.
            self._free.clear()
            fitting = np.empty(numbers, dtype=np.float32)
        else:
            self._free = [memory for memory in self._free if memory is not fitting]
        return fitting, fitting[:numbers].reshape(rows, width)

    def give_back(self, memory: FloatRows) -> None:
        """The memory may be used again."""
        self._free.append(memory)

    def answer(self, call: Call, width: int) -> FloatRows:
        """[rows, width] the answer of a call as an array, without a copy."""
        return np.frombuffer(call.answer, dtype=np.float32).reshape(-1, width)

    def clear(self, target: FloatRows, target_rows: IntArray) -> None:
        """Set rows of the target to zeros."""
        target[target_rows] = 0

    def copy(self, target: FloatRows, answer: FloatRows) -> None:
        """Copy a whole answer into the target."""
        target[:] = answer
