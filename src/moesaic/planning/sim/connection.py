"""What a worker and an expert server send each other: calls, answers, arrivals at a barrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.planning.sim.device import Stream


@dataclass(eq=False)
class Submission:
    """A request to the experts of a layer, as long as parts of its answer are missing."""

    number: int
    layer: int
    experts: IntArray
    """[n * k] the expert of each (row, slot) pair."""
    top_k: int
    missing: int
    """Pairs and empty calls without an answer."""
    is_reported_whole: bool = False
    """Whether its answer is reported at once when it is complete, as in `experts.outstanding.Submission`."""
    unsent_pairs: list[IntArray] = field(default_factory=list)
    """Pairs that no server could take yet."""
    attempt: int = 0
    """How often pairs of it were sent again."""


@dataclass(eq=False, slots=True)
class Call:
    """Pairs of one submission that one server computes, and when what happened to them."""

    number: int
    """Unique among the calls of its worker."""
    submission: Submission
    pairs: IntArray
    """[p] ascending. An empty call has none."""
    experts: IntArray
    """[p] the expert of each pair."""
    rows: int
    """Distinct rows that travel."""
    left: int
    """Pairs without an answer; 1 for an empty call."""
    send_time: float
    arrival_time: float = 0.0
    begin_time: float = 0.0
    """When the run of its first pairs began."""
    end_time: float = 0.0
    """When the run of its last pairs ended."""
    relayed_call: RelayedCall | None = None
    """The call of which it is a part. None: it was sent directly."""
    _answered_mask: npt.NDArray[np.bool_] | None = None
    """[p] whether each pair has its answer. None before the first part of the answer."""

    def receive(self, indices: IntArray) -> int:
        """These of its pairs [r] have their answer. Returns how many answers came."""
        fresh = max(1, len(indices))
        self.left -= fresh
        if self.left:
            if self._answered_mask is None:
                self._answered_mask = np.zeros(len(self.pairs), dtype=bool)
            self._answered_mask[indices] = True
        return fresh

    @property
    def missing(self) -> IntArray:
        """The pairs without an answer, of a call under way."""
        return self.pairs if self._answered_mask is None else self.pairs[~self._answered_mask]


@dataclass(eq=False)
class RelayedPart:
    """The part of a call that one server computes."""

    connection: Connection
    """The worker's connection to that server."""
    call: Call
    live: bool = True
    """Whether its answer is awaited."""

    @property
    def server(self) -> int:
        """The server's number."""
        return self.connection.server


@dataclass(eq=False)
class RelayedCall:
    """A call that goes to a relay, which passes on all parts but the first."""

    relay_connection: Connection
    """The worker's connection to the relay."""
    host: str
    rows: int
    """Distinct rows of all parts."""
    is_sum: bool
    """Whether the relay adds up the parts' sums."""
    parts: list[RelayedPart]
    num_sums: int = 0
    """Parts whose sums the relay has."""

    @property
    def relay(self) -> int:
        """The relay's number."""
        return self.relay_connection.server

    @property
    def live_parts(self) -> list[RelayedPart]:
        """The parts whose answers are awaited."""
        return [part for part in self.parts if part.live]

    def end(self, call: Call) -> None:
        """This part is complete, or it is taken back."""
        for part in self.parts:
            part.live &= part.call is not call


@dataclass(frozen=True)
class PartAnswer:
    """A server has computed pairs [r] of a part, and the relay has the answer."""

    call: Call
    pairs: IntArray
    rows: int
    """Rows of the answer."""


@dataclass(frozen=True)
class Hello:
    """A worker connects."""


@dataclass(frozen=True)
class Goodbye:
    """A worker has closed the connection."""


@dataclass(frozen=True)
class AtBarrier:
    """A worker is at the beginning of a step, with this number."""

    work: bool
    step: int


Message = Hello | Goodbye | AtBarrier | Call | RelayedCall | PartAnswer


class ServerEnd(Protocol):
    """What a connection knows of its server."""

    stream: Stream

    def take(self, connection: Connection, message: Message) -> None:
        """Something has arrived."""
        ...


class ClientEnd(Protocol):
    """What a connection knows of its worker."""

    stream: Stream

    def take(self, connection: Connection, news: Callable[[], None]) -> None:
        """Something has arrived. news: carries it out, once the worker looks."""
        ...


@dataclass(eq=False)
class Connection:
    """A worker's connection to one process of a server."""

    server: int
    """The server's number."""
    client_end: ClientEnd
    server_end: ServerEnd
    calls: dict[int, Call] = field(default_factory=dict)
    """Calls without a complete answer, by number of the call."""
    is_closed: bool = False
    """Whether the worker has closed it: what comes later is lost."""
    is_broken: bool = False
    """Whether the server's process is gone."""

    def send(self, message: Message, size: float) -> None:
        """Send a message from the worker to the server."""
        if not self.is_broken:
            arrive = lambda: None if self.is_broken else self.server_end.take(self, message)  # noqa: E731
            self.client_end.stream.send(self.server_end.stream.name, size, arrive)

    def answer(self, news: Callable[[], None], size: float) -> None:
        """Send an answer from the server to the worker. It is lost if the worker has closed its end."""
        arrive = lambda: None if self.is_closed else self.client_end.take(self, news)  # noqa: E731
        self.server_end.stream.send(self.client_end.stream.name, size, arrive)
