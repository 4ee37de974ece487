"""The relay in an expert server: passes parts of a request to servers of the same host, and answers back.

A client of another host sends a row once to one server of this host, even if several of them need it. This is
hierarchical all-to-all, as in Tutel. In DeepEP one GPU of the node gets the token and passes it on by NVLink.
A request that a relay sends is never passed on again, so two relays cannot wait for each other. Nothing here
waits: what a neighbour cannot take now is answered as not computed, and the client asks that server itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.experts import ServerEntry
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts import wire
from moesaic.experts.connector import Connector
from moesaic.transport.calls import Call, Caller, Incoming
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)


class Answering(Protocol):
    """A call of a client, or the part of it that one server computes."""

    def publish(self, indices: IntArray) -> None:
        """Let the client read these [n] rows."""
        ...


class RelayedRequest:
    """A request with parts, as far as its answer is known."""

    def __init__(self, incoming: Incoming, request: wire.Request, answer: FloatRows) -> None:
        """answer: [rows, h] all rows that the client waits for."""
        self._incoming, self._answer = incoming, answer
        self._is_sum = request.weights is not None
        self._unpublished_rows = np.ones(len(answer), dtype=np.bool_)
        self.parts = [self._part(request, number) for number in range(len(request.parts))]
        first = 0
        for part in self.parts:
            if not self._is_sum:
                part.first, part.answer = first, answer[first : first + part.num_missing]
                first += part.num_missing
        self._left = len(self.parts)

    def _part(self, request: wire.Request, number: int) -> PartOfRequest:
        """A part as a request of its own, with copies of the rows that it needs."""
        pairs = request.slices[number]
        row_indices, row_of = np.unique(request.rows[pairs], return_inverse=True)
        weights = None if request.weights is None else request.weights[pairs].copy()
        part_request = replace(
            request,
            experts=request.experts[pairs],
            rows=row_of,
            weights=weights,
            hidden=request.hidden[row_indices],
            parts=(),
        )
        answer = np.empty((part_request.answer_rows, request.hidden.shape[1]), dtype=np.float32)
        return PartOfRequest(
            self, request.parts[number].server, part_request, row_indices, answer, len(answer)
        )

    def publish(self, part: PartOfRequest, indices: IntArray) -> None:
        """These rows of the part's answer are there."""
        if not self._is_sum:
            self._publish(part.first + indices)
            return
        self._left -= 1  # a part with sums is published at once
        if not self._left and self._unpublished_rows.all():
            self._answer[:] = 0
            for part_of_sum in sorted(self.parts, key=lambda part_of_sum: part_of_sum.server):
                self._answer[part_of_sum.row_indices] += part_of_sum.answer
            self._publish(np.arange(len(self._answer)))

    def refuse(self, part: PartOfRequest) -> None:
        """Answer that the rest of this part is not computed. A sum without it is of no use."""
        rows = np.arange(len(self._answer))
        if not self._is_sum:
            rows = rows[part.first : part.first + len(part.answer)]
        # A row is published once. What came in before the neighbour was lost counts.
        rows = rows[self._unpublished_rows[rows]]
        self._answer.view(np.uint32)[rows] = wire.NOT_COMPUTED
        self._publish(rows)

    def _publish(self, rows: IntArray) -> None:
        if len(rows):
            self._unpublished_rows[rows] = False
            self._incoming.publish(rows)


@dataclass(eq=False)
class PartOfRequest:
    """The pairs of a relayed request that one server computes."""

    relayed_request: RelayedRequest
    server: int
    request: wire.Request
    """The part as a request of its own."""
    row_indices: IntArray
    """[m] which rows of the whole request are its rows, ascending."""
    answer: FloatRows
    """[rows, h] memory for its answer."""
    num_missing: int
    """Rows that its server has not answered."""
    first: int = 0
    """Which row of the whole answer is its first one, where sums are not added up."""

    def publish(self, indices: IntArray) -> None:
        """These rows of `answer` are there."""
        self.relayed_request.publish(self, indices)


@dataclass(eq=False)
class _Neighbour:
    """The connection to another server of this host."""

    entry: ServerEntry
    caller: Caller
    greeting: Call | None = None
    """Until it is answered nothing is passed on: the neighbour might take this relay for a client."""
    calls: dict[int, PartOfRequest] = field(default_factory=dict)
    """The parts that this neighbour has not answered, by the number of the call."""


class Relay:
    """Passes parts of requests to its neighbours."""

    def __init__(self, connector: Connector | None, wakeup: Wakeup, hidden: int) -> None:
        """connector: it rings `wakeup`. None: nothing is passed on."""
        self._connector, self._wakeup, self._hidden = connector, wakeup, hidden
        self._entries: dict[int, ServerEntry] = {}
        self._secret = b""
        self._dialling_servers: set[int] = set()
        """Neighbours to which a connection is being made."""
        self._neighbours: dict[int, _Neighbour] = {}

    @property
    def callers(self) -> list[Caller]:
        """The connections to wait for."""
        return [neighbour.caller for neighbour in self._neighbours.values()]

    def fileno(self) -> int:
        """Readable when a connection was made."""
        return self._wakeup.fileno()

    def update(self, entries: Mapping[int, ServerEntry], secret: bytes) -> None:
        """These are the other servers of this host from now on."""
        removed_servers = [server for server, entry in self._entries.items() if entries.get(server) != entry]
        self._entries, self._secret = dict(entries), secret
        for server in removed_servers:
            self._drop(server)
        for server in self._entries:
            self._dial(server)

    def take(self, incoming: Incoming, request: wire.Request, answer: FloatRows) -> PartOfRequest:
        """Pass on all parts of a request but the first, which is returned."""
        relayed_request = RelayedRequest(incoming, request, answer)
        for part in relayed_request.parts[1:]:
            if not self._pass_on(part):
                relayed_request.refuse(part)
        return relayed_request.parts[0]

    def poll(self) -> None:
        """Take new connections and answers. Never blocks."""
        if self._connector is not None and self._wakeup.rung:
            self._wakeup.clear()
            for entry, caller in self._connector.take_connections():
                self._join(entry, caller)
        for server, neighbour in list(self._neighbours.items()):
            try:
                for call, indices in neighbour.caller.poll():
                    self._receive(neighbour, call, indices)
            except ConnectionLost as lost:
                LOG.debug("neighbour %d is gone: %s", server, lost)
                self._drop(server)

    def close(self) -> None:
        """Close all connections, and `wakeup`."""
        for server in list(self._entries):
            self._drop(server)
        for _, caller in [] if self._connector is None else self._connector.take_connections():
            caller.close()
        self._wakeup.close()

    def _pass_on(self, part: PartOfRequest) -> bool:
        """Returns False if its server cannot be asked now."""
        neighbour = self._neighbours.get(part.server)
        if neighbour is None or neighbour.greeting is not None:
            self._dial(part.server)
            return False
        request = part.request
        partial, width = request.weights is not None, self._hidden
        size = wire.size(len(request.hidden), len(request.experts), width, partial)
        try:
            call = neighbour.caller.open(size, request.answer_rows, 4 * width)
            if call is None:
                return False
            contents = request.experts, request.rows, request.weights, request.hidden
            wire.write(call.request, request.layer, *contents, request.attempt, request.worker)
            neighbour.caller.post(call)
        except (ConnectionLost, ConfigError):  # `poll` finds a lost connection too
            return False
        neighbour.calls[call.number] = part
        return True

    def _dial(self, server: int) -> None:
        waiting = server in self._dialling_servers or server in self._neighbours
        if self._connector is not None and server in self._entries and not waiting:
            self._dialling_servers.add(server)
            self._connector.start(self._entries[server], self._secret)

    def _join(self, entry: ServerEntry, caller: Caller) -> None:
        self._dialling_servers.discard(entry.server)
        # The server may have been replaced while the connection was made.
        if self._entries.get(entry.server) != entry or entry.server in self._neighbours:
            caller.close()
            return
        neighbour = self._neighbours[entry.server] = _Neighbour(entry, caller)
        try:
            greeting = caller.open(wire.size(0, 0, self._hidden, False), 1, 4 * self._hidden)
            assert greeting is not None, "the first call has room"
            wire.write_greeting(greeting.request, self._hidden)
            caller.post(greeting)
            neighbour.greeting = greeting
        except ConnectionLost:
            self._drop(entry.server)

    def _receive(self, neighbour: _Neighbour, call: Call, indices: IntArray) -> None:
        part = neighbour.calls.get(call.number)
        if part is None:
            if neighbour.greeting is call:
                neighbour.greeting = None
                neighbour.caller.release(call)
            return
        rows: npt.NDArray[np.float32] = np.frombuffer(call.answer, np.float32).reshape(-1, self._hidden)
        part.answer[indices] = rows[indices]
        part.num_missing -= len(indices)
        if not part.num_missing:
            del neighbour.calls[call.number]
            neighbour.caller.release(call)
        part.publish(indices)

    def _drop(self, server: int) -> None:
        """Close the connection to a neighbour. Its unanswered parts are not computed."""
        if self._connector is not None:
            self._connector.stop(server)
        self._dialling_servers.discard(server)
        neighbour = self._neighbours.pop(server, None)
        if neighbour is not None:
            neighbour.caller.close()
            for part in neighbour.calls.values():
                part.relayed_request.refuse(part)
