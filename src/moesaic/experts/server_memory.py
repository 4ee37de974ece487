"""The memory of a server's calls: where it reads rows and writes answers, and what its transport decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from moesaic.core.messages import JoinJob
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts import wire
from moesaic.transport.calls import Incoming
from moesaic.transport.listening import Accept


class CallMemory(Protocol):
    """The rows of one call."""

    @property
    def hidden(self) -> Any:
        """[m, h] the hidden states of the request."""
        ...

    @property
    def rows(self) -> Any:
        """[p, h] the results of its pairs. The backend writes them."""
        ...

    @property
    def answer(self) -> Any:
        """[p, h] one row per pair, or [m, h] one row per row of the request with partial sums."""
        ...

    def sum_pairs(self) -> IntArray:
        """Write the weighted sums of Expert-as-a-Service into the answer, once all pairs are computed.

        Returns the [m] numbers of its rows.
        """
        ...


class ServerMemory(Protocol):
    """The memory of the calls of one server."""

    def parse(self, incoming: Incoming, num_layers: int, num_experts: int) -> wire.Request:
        """The request of a call. Raises DamagedMessage."""
        ...

    def open(self, incoming: Incoming, request: wire.Request) -> CallMemory:
        """The memory of a call that has no parts and an answer of the right size."""
        ...

    def finish(self, computed_pairs: Sequence[tuple[CallMemory, IntArray]]) -> None:
        """The backend has computed these pairs of these calls. They are published after this."""
        ...


@dataclass
class HostCallMemory:
    """The rows of a call in memory of this host."""

    request: wire.Request
    answer: FloatRows
    rows: FloatRows
    """[p, h] the answer itself, or the rows that are summed into it."""

    @classmethod
    def create(cls, request: wire.Request, answer: FloatRows) -> HostCallMemory:
        """The memory of a call whose answer is this array."""
        is_unweighted = request.weights is None
        shape = len(request.experts), answer.shape[1]
        return cls(request, answer, answer if is_unweighted else np.empty(shape, dtype=np.float32))

    @property
    def hidden(self) -> FloatRows:
        """[m, h] the hidden states of the request."""
        return self.request.hidden

    def sum_pairs(self) -> IntArray:
        """Add the weighted rows of the pairs into the answer. Returns the numbers of its rows."""
        rows, weights = self.request.rows, self.request.weights
        assert weights is not None
        self.answer[:] = 0
        for turn in self.request.turns:
            self.answer[rows[turn]] += weights[turn, None] * self.rows[turn]
        return np.arange(len(self.answer))


class HostMemory:
    """A ServerMemory whose rows are in memory of this host: in that of the connections."""

    def __init__(self, hidden: int) -> None:
        """hidden: the numbers of a row."""
        self._hidden = hidden

    def parse(self, incoming: Incoming, num_layers: int, num_experts: int) -> wire.Request:
        """The request of a call. Raises DamagedMessage."""
        return wire.parse(incoming.request, num_layers, num_experts, self._hidden)

    def open(self, incoming: Incoming, request: wire.Request) -> HostCallMemory:
        """The memory of a call, whose answer is in memory of its connection."""
        return HostCallMemory.create(request, self.answer(incoming, request))

    def answer(self, incoming: Incoming, request: wire.Request) -> FloatRows:
        """[rows, h] the answer of a call, in memory of its connection."""
        shape = request.answer_rows, self._hidden
        answer: FloatRows = np.ndarray(shape, np.float32, incoming.answer)
        return answer

    def finish(self, computed_pairs: Sequence[tuple[CallMemory, IntArray]]) -> None:
        """The results are where the client sees them already."""


class JoinedJob(Protocol):
    """A job of processes on GPUs that a server can join."""

    @property
    def can_join(self) -> bool:
        """Whether this process can join it. A process can join one job only."""
        ...

    def join(self, place: JoinJob) -> None:
        """Take this place in the job."""
        ...


@dataclass(frozen=True)
class ServerTransport:
    """What the transport of a server decides."""

    memory: ServerMemory
    kinds: Mapping[str, Accept] = field(default_factory=dict)
    """The kinds of connections that its listener accepts beside the usual ones."""
    job: JoinedJob | None = None
    """The job that it may be told to join."""
