"""Calls: the bulk half of a transport, between attention workers (clients) and expert servers.

A client opens a call, writes the request into the transport's own memory, and posts it. The server answers
row by row, in any order, as the rows get done. The shape is that of Expert-as-a-Service (section 3.2): a
buffer per (client, server) in which one side writes requests, the other answers, and a state word tells
the turn; here a buffer holds many calls, and the state is a count of rows.

    call = caller.open(request_bytes=8, rows=2, row_bytes=4)      None while there is no room
    call.request[:] = b"question"
    caller.post(call)
                                        [incoming] = answerer.poll()
                                        incoming.answer[4:8] = b"two."
                                        incoming.publish(np.array([1]))
    [(call, rows)] = caller.poll()      rows == [1]: call.answer[4:8] may be read
    caller.release(call)                once all rows were read, or to give the call up

One thread uses an end at a time. Memory handed out stays mapped while something refers to it, also after
`close`, but a call that is over has no claim on what lies in it: other calls use it. What a peer wrote is
the peer's word and has to be checked like any input.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

MAX_CALLS = 256
"""Calls of one connection between open and release."""
MAX_ROWS = 1 << 20
"""Rows of one call."""
HEAP_BYTES = 256 << 20
"""Default of what the open calls of one connection may take together."""
MIN_HEAP, MAX_HEAP = 4096, 1 << 38


class Call(Protocol):
    """A client's call, from open to release."""

    @property
    def number(self) -> int:
        """From 1, once per connection."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def request(self) -> memoryview:
        """[request_bytes] to be written before post."""
        ...

    @property
    def answer(self) -> memoryview:
        """[rows * row_bytes] row i may be read from the moment `poll` reported i until release."""
        ...


class Incoming(Protocol):
    """A call as the server sees it."""

    @property
    def number(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def request(self) -> memoryview:
        """[request_bytes] read-only, until the last row is published. Check a copy of what must not change
        in between: a hostile client can write here."""
        ...

    @property
    def answer(self) -> memoryview:
        """[rows * row_bytes] to be written, row i before `publish` names it and not after."""
        ...

    def publish(self, indices: IntArray) -> None:
        """[n] rows of `answer` that the client may read. Each row once, in any order and any portions.

        Does nothing when the client is gone: `Answerer.poll` tells. Raises ValueError for a row that is
        none or was published before; nothing is published then.
        """
        ...


class End(Protocol):
    """What `waiting.wait` needs of both ends."""

    def fileno(self) -> int:
        """The connection's socket, to be watched for `events`."""
        ...

    @property
    def events(self) -> int:
        """select.POLLIN, and POLLOUT while there is output that the socket did not take."""
        ...

    def ready(self) -> bool:
        """Whether `poll` has something to tell that the socket does not show. Costs no system call."""
        ...

    def arm(self) -> bool:
        """Have the peer ring the socket at its next news. True if there are some already: don't sleep."""
        ...

    def disarm(self) -> None:
        """The peer need not ring any more."""
        ...

    def close(self) -> None:
        """Let the peer see the end, give up what is open. Calling it again does nothing."""
        ...


class Caller(End, Protocol):
    """The client's end of one connection to one server."""

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        """Memory for a request and for its answer of `rows` equal rows; None while there is no room.

        Raises ConfigError if it can never fit, ConnectionLost if this end is lost or closed.
        """
        ...

    def post(self, call: Call) -> None:
        """The request is complete. Once per call. Raises ConnectionLost if the server is known to be gone."""
        ...

    def poll(self) -> list[tuple[Call, IntArray]]:
        """The rows published since the last poll: (call, [n] indices). Each row once; never blocks.

        Raises ConnectionLost once the server is gone and everything that it published was reported.
        """
        ...

    def release(self, call: Call) -> None:
        """The call is over: its memory may be used again, its rows are not reported any more.

        A call that is given up before all rows came takes its room until the server is done with it.
        """
        ...


class Answerer(End, Protocol):
    """The server's end of one connection to one client."""

    def poll(self) -> list[Incoming]:
        """The calls posted since the last poll, in the order of posting. Never blocks.

        Raises ConnectionLost when the client is gone or sent what is no call.
        """
        ...


class Outstanding:
    """Which rows of a call are still to come.

    >>> rows = Outstanding(3)
    >>> rows.take(np.array([2, 0]))
    >>> rows.count
    1
    """

    def __init__(self, rows: int) -> None:
        self._missing = np.ones(rows, np.bool_)
        self.count = rows

    def take(self, indices: npt.NDArray[np.integer]) -> None:
        """These rows are out. Raises ValueError, and takes none, if one is no row or is out already."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._missing):
            raise ValueError("a row was published that is none of the call's")
        after = self._missing.copy()
        after[indices] = False
        left = int(np.count_nonzero(after))
        if left != self.count - len(indices):
            raise ValueError("a row was published twice")
        self._missing, self.count = after, left


def refuse(request_bytes: int, rows: int, row_bytes: int, heap_bytes: int) -> ConfigError:
    """Why such a call can never be opened."""
    if not 1 <= rows <= MAX_ROWS:
        return ConfigError.field("rows", rows, f"1 to {MAX_ROWS}")
    if request_bytes < 0 or row_bytes < 0:
        name, value = ("request_bytes", request_bytes) if request_bytes < 0 else ("row_bytes", row_bytes)
        return ConfigError.field(name, value, "at least 0")
    total = request_bytes + rows * row_bytes
    return ConfigError.field("request_bytes + rows * row_bytes", total, f"what fits into {heap_bytes} bytes")
