"""A connection within one process. Messages are passed on without copying or encoding."""

from __future__ import annotations

import queue

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message


class LocalConnection:
    """One end of a pair that `local_pair` made."""

    def __init__(self, inbox: queue.Queue[Message | None], outbox: queue.Queue[Message | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False
        self._lost = False

    def send(self, message: Message) -> None:
        if self._closed or self._lost:
            raise ConnectionLost("the connection is closed")
        self._outbox.put(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._lost or self._closed:
            raise ConnectionLost("the other end closed the connection")
        try:
            message = self._inbox.get(block=timeout != 0, timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._lost = True
            raise ConnectionLost("the other end closed the connection")
        return message

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outbox.put(None)
            self._inbox.put(None)  # for a thread that waits at this end


def local_pair() -> tuple[LocalConnection, LocalConnection]:
    """Two connected ends."""
    one: queue.Queue[Message | None] = queue.Queue()
    two: queue.Queue[Message | None] = queue.Queue()
    return LocalConnection(one, two), LocalConnection(two, one)
