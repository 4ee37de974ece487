"""The one interface of every transport."""

from __future__ import annotations

from typing import Protocol

from moesaic.core.messages import Message


class Connection(Protocol):
    """Two ends, messages in order, each delivered once or the connection is lost.

    `send` may be called from any thread; `receive` from one thread at a time.
    """

    def send(self, message: Message) -> None:
        """Queue or write `message`. Raises ConnectionLost if the peer is gone."""
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when `timeout` seconds passed (0 polls, None waits for ever).

        Raises ConnectionLost once the peer is gone and everything it sent was received.
        """
        ...

    def close(self) -> None:
        """Let the peer see the end. Calling it again does nothing."""
        ...
