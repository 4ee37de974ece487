"""The interface of every message transport.

Question: What does a transport have to do for messages?
"""

from __future__ import annotations

from typing import Protocol

from moesaic.core.messages import Message


class Connection(Protocol):
    """The end of a connection that delivers messages in order, each exactly once until it is lost.

    `send` may be called from any thread, `receive` from one thread at a time.
    """

    def send(self, message: Message) -> None:
        """Queue or write `message`. Raises ConnectionLost if the peer is gone."""
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after `timeout` seconds. 0 only polls, and None waits without limit.

        Raises ConnectionLost once the peer is gone and all of its messages were received.
        """
        ...

    def close(self) -> None:
        """Close the connection, which the peer notices. A repeated call does nothing."""
        ...
