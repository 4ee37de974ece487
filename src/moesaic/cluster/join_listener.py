"""Where servers from other machines join by hand: a socket beside the cluster's own processes.

Whoever knows the cluster's secret gets in; both sides prove it (`transport.authentication`), nothing after
that is encrypted. A peer that stalls or does not know the secret is dropped with one line in the log.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import Deadline, prove_as_server
from moesaic.transport.stream import StreamConnection

HANDSHAKE_SECONDS = 10.0
STOP_SECONDS = 5.0
"""For a server to leave that was sent away."""
MAX_PENDING = 16
"""Handshakes at the same time."""


@dataclass
class RemoteProcess:
    """A server on another machine: all that is known of it is its connection."""

    connection: StreamConnection
    peer: str
    capacity: float = 1.0
    """Its weight, as it says."""

    @property
    def pid(self) -> int | None:
        return None

    def how_it_ended(self) -> str:
        """For a person, once the connection is lost."""
        return f"the connection to {self.peer} is lost"

    def kill(self) -> None:
        """Give it up: when it sees that it joins again."""
        self.connection.close()

    def stop(self) -> None:
        """Send it away, and wait for that."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Shutdown())
            self.connection.ended(STOP_SECONDS)  # closing at once could overtake the word
        self.connection.close()


class JoinListener:
    """Listens at `address`, tcp:HOST:PORT. welcome: called, in a thread of the peer's, with who passed."""

    def __init__(self, address: str, secret: bytes, welcome: Callable[[RemoteProcess], None]) -> None:
        """Raises ConfigError if it cannot listen there."""
        self._secret = secret
        try:
            where = addresses.parse(address)
            if where.path:
                raise ConfigError.field("address", address, "tcp:HOST:PORT")
            listening, where = addresses.bind(where)
        except ConfigError as error:
            raise ConfigError(f"--cluster-address: {error}") from error
        self.address = str(where)
        """With the real port."""
        self._acceptor = Acceptor(listening, self.address, self._enlisted, welcome, MAX_PENDING)

    def close(self) -> None:
        """Let nobody in any more. Again: nothing."""
        self._acceptor.close()

    def _enlisted(self, sock: socket.socket) -> RemoteProcess:
        """Who knows the secret and says what it has to say first; all others raise."""
        host, port = sock.getpeername()[:2]
        prove_as_server(sock, self._secret, Deadline(HANDSHAKE_SECONDS))
        with contextlib.ExitStack() as undo:
            connection = StreamConnection(sock)
            undo.callback(connection.close)
            word = connection.receive(HANDSHAKE_SECONDS)
            if not isinstance(word, messages.Enlist) or not 0 < word.capacity < math.inf:
                raise ConnectionLost(f"it said {type(word).__name__}, not Enlist with a positive capacity")
            undo.pop_all()
            return RemoteProcess(connection, f"{host}:{port}", word.capacity)
