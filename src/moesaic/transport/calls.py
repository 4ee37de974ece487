"""Calls: the bulk part of a transport, between attention workers (clients) and expert servers.

A client opens a call, writes the request into the transport's own memory, and posts it. The server answers
row by row, in any order, as rows are finished. The design follows Expert-as-a-Service (section 3.2). There, a
(client, server) pair shares a buffer: one side writes requests, the other answers, and a state word says
whose turn it is. Here a buffer holds many calls, and the state is a count of rows.

    call = caller.open(request_bytes=8, rows=2, row_bytes=4)      None while there is no room
    call.request[:] = b"question"
    caller.post(call)
                                        [incoming] = answerer.poll()
                                        incoming.answer[4:8] = b"two."
                                        incoming.publish(np.array([1]))
    [(call, rows)] = caller.poll()      rows == [1]: call.answer[4:8] may be read
    caller.release(call)                once all rows were read, or to give the call up

Only one thread at a time may use an end. Views of a call's memory stay valid while they are referenced, also
after `close`. But after a call has ended, other calls overwrite its memory. Bytes that a peer wrote must be
checked like any input.

Question: What does a transport have to do for rows of experts?
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

MAX_CALLS = 256
"""Maximum calls of one connection between open and release."""
MAX_ROWS = 1 << 20
"""Maximum rows of one call."""
HEAP_BYTES = 256 << 20
"""Default maximum bytes of all open calls of one connection."""
MIN_HEAP, MAX_HEAP = 4096, 1 << 38


class Call(Protocol):
    """A client's call, from open to release."""

    @property
    def number(self) -> int:
        """Number of the call, counted from 1 within its connection."""
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
        """[rows * row_bytes] Row i may be read after `poll` reported it and before release."""
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
        """[request_bytes] read-only, valid until the last row is published.

        A hostile client can change these bytes at any time. So copy what must not change before checking it.
        """
        ...

    @property
    def answer(self) -> memoryview:
        """[rows * row_bytes] Row i must be written before `publish` names it, and not after."""
        ...

    def publish(self, indices: IntArray) -> None:
        """Let the client read these [n] rows of `answer`. Each row is published once, in any order and
        grouping.

        Does nothing when the client is gone, which `Answerer.poll` reports. Raises ValueError for a row that
        does not exist or was published before. Then nothing is published.
        """
        ...


class End(Protocol):
    """What `waiting.wait` needs from both kinds of ends."""

    def fileno(self) -> int:
        """The connection's socket, to be watched for `events`."""
        ...

    @property
    def events(self) -> int:
        """select.POLLIN, and POLLOUT while there is output that the socket did not accept."""
        ...

    def ready(self) -> bool:
        """Whether `poll` has news that the socket does not show. Makes no system call."""
        ...

    def arm(self) -> bool:
        """Ask the peer to write to the socket at its next news.

        True if there is news already: then do not sleep.
        """
        ...

    def disarm(self) -> None:
        """Stop asking the peer to write to the socket."""
        ...

    def close(self) -> None:
        """Close this end, which the peer notices, and give up open calls. A repeated call does nothing."""
        ...


class Caller(End, Protocol):
    """The client's end of one connection to one server."""

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        """Allocate memory for a request and its answer of `rows` equal rows. None while there is no room.

        Raises ConfigError if it can never fit, and ConnectionLost if this end is lost or closed.
        """
        ...

    def post(self, call: Call) -> None:
        """Send the request, once per call. Raises ConnectionLost if the server is known to be gone."""
        ...

    def poll(self) -> list[tuple[Call, IntArray]]:
        """The rows published since the last poll: (call, [n] indices). Each row comes once. Never blocks.

        Raises ConnectionLost once the server is gone and everything that it published was reported.
        """
        ...

    def release(self, call: Call) -> None:
        """End the call: its memory may be reused, and its rows are not reported any more.

        A call that ends before all of its rows arrived uses its memory until the server has finished it.
        """
        ...


class Answerer(End, Protocol):
    """The server's end of one connection to one client."""

    def poll(self) -> list[Incoming]:
        """The calls posted since the last poll, in the order of posting. Never blocks.

        Raises ConnectionLost when the client is gone or sent an invalid call.
        """
        ...


class Outstanding:
    """The rows of a call that are not published yet.

    >>> rows = Outstanding(3)
    >>> rows.take(np.array([2, 0]))
    >>> rows.count
    1
    """

    def __init__(self, rows: int) -> None:
        self._missing = np.ones(rows, np.bool_)
        self.count = rows

    def take(self, indices: npt.NDArray[np.integer]) -> None:
        """Mark these rows as published.

        Raises ValueError, and marks none, if a row does not exist or was published before.
        """
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._missing):
            raise ValueError("a row was published that the call does not have")
        # In a copy, so that a call with a wrong row marks none.
        missing = self._missing.copy()
        missing[indices] = False
        left = int(np.count_nonzero(missing))
        if left != self.count - len(indices):
            raise ValueError("a row was published twice")
        self._missing, self.count = missing, left


def refuse(request_bytes: int, rows: int, row_bytes: int, heap_bytes: int) -> ConfigError:
    """The error of a call that can never be opened."""
    if not 1 <= rows <= MAX_ROWS:
        return ConfigError.field("rows", rows, f"1 to {MAX_ROWS}")
    if request_bytes < 0 or row_bytes < 0:
        name, value = ("request_bytes", request_bytes) if request_bytes < 0 else ("row_bytes", row_bytes)
        return ConfigError.field(name, value, "at least 0")
    total = request_bytes + rows * row_bytes
    return ConfigError.field("request_bytes + rows * row_bytes", total, f"what fits into {heap_bytes} bytes")
