"""A connection within one process. Messages are passed on without copying or encoding."""

from __future__ import annotations

import queue

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message


class LocalConnection:
    """An end of a pair that `local_pair` made."""

    def __init__(self, inbox: queue.Queue[Message | None], outbox: queue.Queue[Message | None]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._is_closed = False
        self._is_peer_gone = False

    def send(self, message: Message) -> None:
        if self._is_closed or self._is_peer_gone:
            raise ConnectionLost("the connection is closed")
        self._outbox.put(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._is_peer_gone or self._is_closed:
            raise ConnectionLost("the other end closed the connection")
        try:
            message = self._inbox.get(block=timeout != 0, timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._is_peer_gone = True
            raise ConnectionLost("the other end closed the connection")
        return message

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._outbox.put(None)
            self._inbox.put(None)  # for a thread that waits at this end


def local_pair() -> tuple[LocalConnection, LocalConnection]:
    """Two connected ends."""
    first_queue: queue.Queue[Message | None] = queue.Queue()
    second_queue: queue.Queue[Message | None] = queue.Queue()
    return LocalConnection(first_queue, second_queue), LocalConnection(second_queue, first_queue)
