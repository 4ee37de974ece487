"""Calls: the bulk half of a transport, between attention workers (clients) and expert servers.

A client opens a call, writes the request into the transport's memory, and posts it. The server answers row
by row, in any order, as rows are computed. The design is that of Expert-as-a-Service (section 3.2): a
buffer for each (client, server) in which one side writes requests and the other answers, and a state word
that tells whose turn it is. Here a buffer holds many calls, and the state is a count of rows.

    call = caller.open(request_bytes=8, rows=2, row_bytes=4)      None while there is no room
    call.request[:] = b"question"
    caller.post(call)
                                        [incoming] = answerer.poll()
                                        incoming.answer[4:8] = b"two."
                                        incoming.publish(np.array([1]))
    [(call, rows)] = caller.poll()      rows == [1]: call.answer[4:8] may be read
    caller.release(call)                once all rows were read, or to give the call up

One thread at a time uses an end. Memory stays mapped while something refers to it, even after `close`. But
the content of a released call's memory is undefined, since other calls use it. What a peer has written must
be checked like any input.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

MAX_CALLS = 256
"""Maximum number of calls of one connection between open and release."""
MAX_ROWS = 1 << 20
"""Maximum number of rows of one call."""
HEAP_BYTES = 256 << 20
"""Default of the bytes that the open calls of one connection may take together."""
MIN_HEAP, MAX_HEAP = 4096, 1 << 38


class Call(Protocol):
    """A client's call, from open to release."""

    @property
    def number(self) -> int:
        """Number of the call within its connection, from 1."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def request(self) -> memoryview:
        """[request_bytes] memory to be written before post."""
        ...

    @property
    def answer(self) -> memoryview:
        """[rows * row_bytes] row i may be read after `poll` has reported it and until release."""
        ...


class Incoming(Protocol):
    """A call on the server's side."""

    @property
    def number(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def request(self) -> memoryview:
        """[request_bytes] read-only, valid until the last row is published. Check a copy of what must not
        change in between: a hostile client can write here."""
        ...

    @property
    def answer(self) -> memoryview:
        """[rows * row_bytes] memory for the answer. Row i is written before `publish` names it and not
        after."""
        ...

    def publish(self, indices: IntArray) -> None:
        """Let the client read rows [n] of `answer`. Each row once, in any order and any portions.

        Does nothing if the client is gone: `Answerer.poll` reports that. Raises ValueError, and publishes
        nothing, for a row that does not exist or was published before.
        """
        ...


class End(Protocol):
    """The part of both ends that `waiting.wait` needs."""

    def fileno(self) -> int:
        """The connection's socket, to be watched for `events`."""
        ...

    @property
    def events(self) -> int:
        """select.POLLIN, and POLLOUT while there is output that the socket has not accepted."""
        ...

    def ready(self) -> bool:
        """True if `poll` has news that the socket does not show. Costs no system call."""
        ...

    def arm(self) -> bool:
        """Ask the peer to write to the socket at its next news. True if there is news already: do not
        sleep."""
        ...

    def disarm(self) -> None:
        """The peer need not write to the socket any more."""
        ...

    def close(self) -> None:
        """Close the connection and give up open calls; the peer notices. A second call does nothing."""
        ...


class Caller(End, Protocol):
    """The client's end of one connection to one server."""

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        """Memory for a request and for its answer of `rows` equal rows; None while there is no room.

        Raises ConfigError if it can never fit, ConnectionLost if this end is lost or closed.
        """
        ...

    def post(self, call: Call) -> None:
        """Send a complete request, once for each call. Raises ConnectionLost if the server is known to be
        gone."""
        ...

    def poll(self) -> list[tuple[Call, IntArray]]:
        """The rows published since the last poll: (call, [n] indices). Each row once; never blocks.

        Raises ConnectionLost once the server is gone and everything that it published was reported.
        """
        ...

    def release(self, call: Call) -> None:
        """End the call: its memory may be reused, and its rows are no longer reported.

        A call that is released before all rows came keeps its room until the server is done with it.
        """
        ...


class Answerer(End, Protocol):
    """The server's end of one connection to one client."""

    def poll(self) -> list[Incoming]:
        """The calls posted since the last poll, in the order of posting. Never blocks.

        Raises ConnectionLost if the client is gone or sent something that is not a call.
        """
        ...


class Outstanding:
    """The rows of a call that are still missing.

    >>> rows = Outstanding(3)
    >>> rows.take(np.array([2, 0]))
    >>> rows.count
    1
    """

    def __init__(self, rows: int) -> None:
        self._missing = np.ones(rows, np.bool_)
        self.count = rows

    def take(self, indices: npt.NDArray[np.integer]) -> None:
        """These rows are no longer missing. Raises ValueError, and takes none, for a row that does not
        exist or is not missing."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._missing):
            raise ValueError("a row was published that is none of the call's")
        after = self._missing.copy()
        after[indices] = False
        left = int(np.count_nonzero(after))
        if left != self.count - len(indices):
            raise ValueError("a row was published twice")
        self._missing, self.count = after, left


def refuse(request_bytes: int, rows: int, row_bytes: int, heap_bytes: int) -> ConfigError:
    """The error for a call that can never be opened."""
    if not 1 <= rows <= MAX_ROWS:
        return ConfigError.field("rows", rows, f"1 to {MAX_ROWS}")
    if request_bytes < 0 or row_bytes < 0:
        name, value = ("request_bytes", request_bytes) if request_bytes < 0 else ("row_bytes", row_bytes)
        return ConfigError.field(name, value, "at least 0")
    total = request_bytes + rows * row_bytes
    return ConfigError.field("request_bytes + rows * row_bytes", total, f"what fits into {heap_bytes} bytes")
