"""The socket through which expert servers of other machines join the cluster.

A server that knows the cluster's secret may join. Both sides prove that they know it
(`transport.authentication`). Everything after that is encrypted (`transport.sealing`). A peer that stalls or
does not know the secret is disconnected. The log has one line about it, or one about many.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.policy.fleet.silence import RULE
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import Deadline, prove_as_server
from moesaic.transport.sealed_socket import wire
from moesaic.transport.stream import StreamConnection

HANDSHAKE_SECONDS = 10.0
STOP_SECONDS = 5.0
"""Seconds that a server has to leave after it was asked to."""
MAX_PENDING = 64
"""Maximum number of handshakes at the same time.

A further peer replaces the oldest one. So a server is kept out only if so many strangers come while it does
its handshake, and then it tries again.
"""


@dataclass
class RemoteProcess:
    """An expert server on another machine. Only its connection is known."""

    connection: StreamConnection
    peer: str
    capacity: float = 1.0
    """Capacity weight that the server sent."""

    @property
    def pid(self) -> int | None:
        return None

    def how_it_ended(self) -> str:
        """How the process ended, in words for people. Called once the connection is lost."""
        why = "" if self.connection.lost is None else f": {self.connection.lost}"
        return f"the connection to {self.peer} is lost{why}"

    def kill(self) -> None:
        """Closes the connection. The server joins again when it notices."""
        self.connection.close()

    def stop(self) -> None:
        """Asks the server to leave, and waits until it has."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Shutdown())
            self.connection.ended(STOP_SECONDS)  # an immediate close could arrive before the message
        self.connection.close()


class JoinListener:
    """Listens at `address`, tcp:HOST:PORT."""

    def __init__(self, address: str, secret: bytes, welcome: Callable[[RemoteProcess], None]) -> None:
        """welcome: called with each server that has passed the handshake, in a thread of its own.

        Raises ConfigError if it cannot listen there.
        """
        self._secret = secret
        try:
            where = addresses.parse(address)
            if where.path:
                raise ConfigError.field("address", address, "tcp:HOST:PORT")
            listening, where = addresses.bind(where)
        except ConfigError as error:
            raise ConfigError(f"--cluster-address: {error}") from error
        self.address = str(where)
        """Address with the real port."""
        self._acceptor = Acceptor(listening, self.address, self._enlisted, welcome, MAX_PENDING)

    @property
    def dropped(self) -> int:
        """Peers that were not accepted."""
        return self._acceptor.dropped

    def close(self) -> None:
        """Stops listening. A second call does nothing."""
        self._acceptor.close()

    def _enlisted(self, sock: socket.socket) -> RemoteProcess:
        """Authenticates a peer and reads its first message. Raises for anything that is not an expert
        server."""
        host, port = sock.getpeername()[:2]
        _, keys = prove_as_server(sock, self._secret, Deadline(HANDSHAKE_SECONDS))
        with contextlib.ExitStack() as undo:
            connection = StreamConnection(wire(sock, keys), silent_limit=RULE.gone_while_starting)
            undo.callback(connection.close)
            word = connection.receive(HANDSHAKE_SECONDS)
            if not isinstance(word, messages.Enlist) or not 0 < word.capacity < math.inf:
                raise ConnectionLost(f"it sent {type(word).__name__}, not Enlist with a positive capacity")
            undo.pop_all()
            return RemoteProcess(connection, f"{host}:{port}", word.capacity)
