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

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moesaic.config import RelayUse
from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.outstanding import (
    AnswerMemory,
    OpenCall,
    RelayedCall,
    RelayedPart,
    ServerConnection,
    Submission,
)
from moesaic.policy.fleet.relays import Relays
from moesaic.policy.fleet.replicas import Replicas

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
        """`RelayedCall.select_computed` looks for such sums. Here it is not known which server would be at
        fault."""


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
        self._relays.rest_host(relayed_call.host, now)

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
        relayed
        for one in connections.values()
        for relayed in one.relayed_calls.values()
        if relayed.live_parts
    ]
