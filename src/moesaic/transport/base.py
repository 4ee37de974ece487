"""The interface of every transport."""

from __future__ import annotations

from typing import Protocol

from moesaic.core.messages import Message


class Connection(Protocol):
    """One end of a connection. Messages arrive in order, each exactly once, or the connection is lost.

    `send` may be called from any thread; `receive` from one thread at a time.
    """

    def send(self, message: Message) -> None:
        """Queue or write `message`. Raises ConnectionLost if the peer is gone."""
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None after `timeout` seconds (0 polls, None waits for ever).

        Raises ConnectionLost once the peer is gone and everything that it sent has been received.
        """
        ...

    def close(self) -> None:
        """Close the connection; the peer notices. A second call does nothing."""
        ...
