"""The client's side of relays: calls with parts that one server passes on to others of its host.

Each part is an `OpenCall` of the server that computes it. So timeouts, replicas and blame are those of calls
that are sent directly. The whole call belongs to the connection to the relay. Parts that come to nothing are
taken back and sent again, directly (`RemoteExperts`):

| event | taken back |
|---|---|
| the relay cannot pass a part on, and says so | this part |
| the relay, or the server of a part, is soon late (`Replicas.slow`) | the part, or those of the relay |
| the relay is lost | the parts of its other servers |
| a sum of several servers is not finite, and no server is known to be at fault | the parts of the sum |

If a part of a sum is taken back, the sum's other parts are as well: nothing else would answer their pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from moesaic.config import RelayUse
from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts import wire
from moesaic.experts.outstanding import AnswerMemory, OpenCall, ServerConnection, Submission
from moesaic.policy.fleet.relays import Relays
from moesaic.policy.fleet.replicas import Replicas
from moesaic.transport.calls import Call

Shares = list[tuple[int, IntArray]]
"""[(server, its pairs), ...]"""


@dataclass(eq=False)
class PartOfCall:
    """The part of a call that one server answers, as a call of its own. It has no request."""

    number: int
    """Below 0, so that it is no number of the server's connection."""
    rows: int
    row_bytes: int
    answer: memoryview
    request: memoryview = field(default_factory=lambda: memoryview(b""))


class HostSum(OpenCall):
    """The part of one server in sums that the relay adds up. All parts have their answer at once.

    The first pair of each row gets the sum, whichever part has it. The others get zeros.
    """

    firsts: tuple[IntArray, IntArray]
    """Pairs of this part that are the first of their rows, and these rows in the answer."""

    def receive(self, indices: IntArray, memory: AnswerMemory) -> tuple[IntArray, int]:
        fresh = self._mark(np.arange(len(self.pairs)))
        if self.submission.is_released:
            return self.pairs[:0], fresh
        target, (pairs, rows) = self.submission.answer_memory(memory), self.firsts
        target[self.pairs] = 0
        memory.put(target, pairs, memory.answer(self.call, self._width), rows)
        return self.pairs, fresh

    def find_nonfinite_row(self, indices: IntArray) -> None:
        """`RelayedCall.usable` looks for such sums. Here it is not known which server would be at fault."""


@dataclass(eq=False)
class RelayedPart:
    """A part of a call that is under way."""

    server: int
    call: OpenCall
    first: int
    """Its first row in the whole answer."""
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
        """Those of the part's rows that were computed. For sums: all or none."""
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


class Relaying:
    """Decides which calls have parts, and sends them."""

    def __init__(self, use: RelayUse, replicas: Replicas, row_bytes: int, worker: int) -> None:
        """row_bytes: of a hidden state. worker: this worker's number in requests."""
        self._replicas, self._worker = replicas, worker
        self._relays = Relays(use, row_bytes)
        self._number = 0

    def groups(self, submission: Submission, shares: Shares, now: float) -> list[Shares]:
        """The shares, with those together that are sent as the parts of one call. The relay is the first."""
        pairs, partial = dict(shares), submission.gate_weights is not None
        groups = self._relays.groups(pairs, submission.top_k, self._replicas.ways, partial, now)
        relayed_groups = [[(server, pairs.pop(server)) for server in group] for group in groups]
        return relayed_groups + [[share] for share in pairs.items()]

    def post(
        self, connection: ServerConnection, submission: Submission, shares: Shares, version: int
    ) -> RelayedCall | None:
        """Send the shares as one call to the relay. None if there is no room for it, or it is gone."""
        layer, top_k, width = submission.layer, submission.top_k, submission.hidden.shape[1]
        pairs = np.concatenate([share for _, share in shares])
        row_indices, row_of = np.unique(pairs // top_k, return_inverse=True)
        hidden, weights = submission.hidden[row_indices], submission.gate_weights_of(pairs)
        is_sum = weights is not None
        answers = len(hidden) if is_sum else len(pairs)
        parts = [wire.Part(server, len(share)) for server, share in shares]
        try:
            size = wire.size(len(hidden), len(pairs), width, is_sum, len(parts))
            call = connection.caller.open(size, answers, 4 * width)
            if call is None:
                return None
            contents = submission.experts[pairs], row_of, weights, hidden, submission.attempt, self._worker
            wire.write(call.request, layer, *contents, parts)
            connection.caller.post(call)
        except ConnectionLost:
            return None
        host = self._replicas.ways[shares[0][0]].host
        relayed_call = RelayedCall(connection.entry.server, host, call, hidden, connection.end, is_sum, [])
        first = 0
        for server, share in shares:
            part = self._part(relayed_call, submission, share, first, version)
            relayed_call.parts.append(RelayedPart(server, part, first))
            first += 0 if is_sum else len(share)
        if is_sum:
            _place_sums(relayed_call)
        connection.relayed_calls[call.number] = relayed_call
        return relayed_call

    def pause_relaying(self, relayed_call: RelayedCall, now: float) -> None:
        """Send no parts to this host for a while."""
        self._relays.rest(relayed_call.host, now)

    def _part(
        self, relayed_call: RelayedCall, submission: Submission, pairs: IntArray, first: int, version: int
    ) -> OpenCall:
        call, row_bytes = relayed_call.call, relayed_call.call.row_bytes
        rows = call.rows if relayed_call.is_sum else len(pairs)
        answer = call.answer[first * row_bytes : (first + rows) * row_bytes]
        self._number -= 1
        kind = HostSum if relayed_call.is_sum else OpenCall
        part = kind(submission, pairs, PartOfCall(self._number, rows, row_bytes, answer), version)
        part.relayed_call = relayed_call
        return part


def _place_sums(relayed_call: RelayedCall) -> None:
    """Say for each part which of its pairs get sums."""
    pairs = np.concatenate([part.call.pairs for part in relayed_call.parts])
    owner = np.repeat(
        np.arange(len(relayed_call.parts)), [len(part.call.pairs) for part in relayed_call.parts]
    )
    order = np.argsort(pairs)
    top_k = relayed_call.parts[0].call.submission.top_k
    _, first = np.unique(pairs[order] // top_k, return_index=True)  # [m] rows ascend
    first_pairs = order[first]
    for index, part in enumerate(relayed_call.parts):
        assert isinstance(part.call, HostSum)
        rows = np.flatnonzero(owner[first_pairs] == index)
        part.call.firsts = pairs[first_pairs[rows]], rows


def open_calls(connections: Mapping[int, ServerConnection]) -> list[RelayedCall]:
    """The calls with parts that are under way."""
    return [
        relayed_call
        for connection in connections.values()
        for relayed_call in connection.relayed_calls.values()
        if relayed_call.live_parts
    ]
