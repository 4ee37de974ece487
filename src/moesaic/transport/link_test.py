"""Measures the link to another host, over the encrypted connection of a process that joins from there.

The other end sends each message back as it is. A few empty messages give the latency. Then messages grow
until one takes long enough to tell the bandwidth. The figures include encryption, as those of rows will.

Question: How fast is the link to another host?
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import LinkTest
from moesaic.core.paced_devices import LinkModel
from moesaic.transport.base import Connection
from moesaic.transport.host import this_host

PINGS = 5
SIZES = (1 << 16, 1 << 20, 1 << 22)
"""Bytes of the messages that give the bandwidth, there and back."""
LONG_SECONDS = 0.1
"""Seconds of a message after which no larger one is sent."""
LIMIT_SECONDS = 3.0
"""Seconds after which a measurement is given up."""
REPEAT_SECONDS = 60.0
"""Seconds for which no process of the same host causes another measurement."""


class LinkTests:
    """Measures the links from this host to others. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        """Host -> when its last measurement began."""
        self._lock = threading.Lock()

    def link(self, host: str, connection: Connection) -> LinkModel | None:
        """The link to a host, by the connection of a process there that has sent Enlist.

        None for this host, for a host that was measured a short time ago, and for one that is too slow to
        tell. Raises ConnectionLost if the peer is gone or sends anything else.
        """
        if host in ("", this_host()):
            return None
        with self._lock:
            now = self._clock()
            if now - self._last.get(host, -REPEAT_SECONDS) < REPEAT_SECONDS:
                return None
            self._last[host] = now
        return measure(connection, self._clock)


def measure(connection: Connection, clock: Callable[[], float] = time.monotonic) -> LinkModel | None:
    """Measure for LIMIT_SECONDS at most. None if nothing larger than an empty message came back in time.

    Raises ConnectionLost if the peer is gone or sends anything else.
    """
    end = clock() + LIMIT_SECONDS
    trips = [_trip(connection, 0, clock, end) for _ in range(PINGS)]
    # The shortest trip counts, since other work only adds.
    trip = min((seconds_of_trip for seconds_of_trip in trips if seconds_of_trip is not None), default=None)
    link = None
    for size in SIZES:
        seconds = None if trip is None else _trip(connection, size, clock, end)
        if trip is None or seconds is None:
            return link
        # The larger message may be back sooner than the empty one was.
        link = LinkModel(trip / 2, 2 * size / max(1e-9, seconds - trip))
        if seconds > LONG_SECONDS:
            break
    return link


def _trip(connection: Connection, size: int, clock: Callable[[], float], end: float) -> float | None:
    """Seconds until a message of this size is back. None if it is not back in time."""
    began = clock()
    if began >= end:
        return None
    connection.send(LinkTest(bytes(size)))
    answer = connection.receive(end - began)
    if answer is None:
        return None
    if not isinstance(answer, LinkTest) or len(answer.payload) != size:
        raise ConnectionLost(f"it sent {type(answer).__name__} during the test of its link")
    return clock() - began
