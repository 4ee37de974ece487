"""A connection to a process that has not connected yet.

A launcher starts the process on some host, and the process then connects by itself. Until it does, messages
to it wait here, and `receive` waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Message
from moesaic.transport.base import Connection


class AwaitedConnection:
    """A Connection that begins without a peer. `connect` gives it one, `fail` says that none will come."""

    def __init__(self, change: Callable[[Message], Message] = lambda message: message) -> None:
        """change: applied to each message that the peer sends."""
        self._change = change
        self._lock = threading.Lock()
        self._unsent_messages: list[Message] = []
        self._own_messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """Messages to return before those of the peer. None wakes `receive` after `connect` or `fail`."""
        self._peer: Connection | None = None
        self._failure: str | None = None
        """Why there is no peer and never will be."""

    @property
    def is_waiting(self) -> bool:
        """True until there is a peer, or there will be none."""
        return self._peer is None and self._failure is None

    def connect(self, peer: Connection) -> bool:
        """Sends everything that waits to `peer`, and is a connection to it from now on.

        Returns False, and leaves `peer` alone, if this connection has a peer already or has failed.
        """
        with self._lock:
            if not self.is_waiting:
                return False
            self._peer = peer
            try:
                for message in self._unsent_messages:
                    peer.send(message)
            except ConnectionLost:
                pass  # `receive` reports it
            self._unsent_messages = []
        self._own_messages.put(None)
        return True

    def fail(self, reason: str, message: Message | None = None) -> None:
        """Ends the wait for a peer. `receive` returns `message`, if it is given, and then raises
        ConnectionLost with the reason. Once there is a peer, this does nothing."""
        with self._lock:
            if not self.is_waiting:
                return
            self._failure, self._unsent_messages = reason, []
        if message is not None:
            self._own_messages.put(message)
        self._own_messages.put(None)

    def send(self, message: Message) -> None:
        with self._lock:
            if self._failure is not None:
                raise ConnectionLost(self._failure)
            if self._peer is None:
                self._unsent_messages.append(message)
            else:
                self._peer.send(message)

    def receive(self, timeout: float | None = None) -> Message | None:
        if self._peer is None:
            try:
                message = self._own_messages.get(block=timeout != 0, timeout=timeout)
            except queue.Empty:
                return None
            if message is not None:
                return message
        if self._peer is None:
            self._own_messages.put(None)  # for the next call
            raise ConnectionLost(self._failure)
        message = self._peer.receive(timeout)
        return None if message is None else self._change(message)

    def close(self) -> None:
        """Closes the connection to the peer. Without one, none will be accepted any more."""
        self.fail("the connection is closed")
        if self._peer is not None:
            self._peer.close()
