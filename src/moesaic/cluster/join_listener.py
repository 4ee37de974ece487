"""The socket at which processes join the cluster, from this or another host.

A process that knows the cluster's secret may join. Both sides prove that they know it
(`transport.authentication`). Everything after that is encrypted (`transport.sealing`). A peer that stalls or
does not know the secret is disconnected. The log has one line about it, or one about many.

Question: How does a process of another host join?
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from moesaic.cluster.member import Role
from moesaic.config.values import KernelName
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.paced_devices import LinkModel
from moesaic.policy.fleet.silence import RULE
from moesaic.policy.placement.returning import Kept
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import Deadline, prove_as_server
from moesaic.transport.link_test import LinkTests
from moesaic.transport.sealed_socket import wire
from moesaic.transport.stream import StreamConnection

HANDSHAKE_SECONDS = 10.0
STOP_SECONDS = 5.0
"""Seconds that a process has to leave after it was asked to."""
MAX_PENDING = 64
"""Maximum number of handshakes at the same time.

A further peer replaces the oldest one. So a process fails to join only if so many strangers connect during
its handshake. Then it tries again.
"""


def any_port_address(address: str) -> str:
    """The address, with any free port, at which another process of this host listens for other hosts.

    address: of the cluster, tcp:HOST:PORT. Raises ConfigError.
    """
    location = addresses.parse(address)
    if location.path:
        raise ConfigError.field("--cluster-address", address, "tcp:HOST:PORT")
    return str(location._replace(port=0))


STANDBY = "standby"
"""Role of a `moesaic serve` that watches this one, in Enlist."""
_ROLES = {role.flag: role for role in Role}
_KERNELS = get_args(KernelName)


@dataclass
class RemoteProcess:
    """A process that joined. Only its connection is known, and what it said."""

    connection: StreamConnection
    peer: str
    """tcp address of its end of the connection, without the tcp:"""
    role: Role = Role.SERVER
    capacity: float = 1.0
    """Capacity weight of a server."""
    host_id: str = ""
    """The id of its host, as `transport.host` makes it."""
    instruction_sets: tuple[str, ...] = ()
    """Instruction sets of the native kernels that it can run."""
    ticket: str = ""
    """The ticket that a launcher gave it (`messages.Enlist`). Empty for a process that nobody launched."""
    resident_experts: Kept = field(default_factory=dict)
    """Layer -> the experts that a server has in memory, as it says. Nobody has checked them."""
    link: LinkModel | None = None
    """The link to its host, if it was measured."""
    is_standby: bool = False
    """True for a `moesaic serve` that watches this one. It has no role."""
    is_killed: bool = False
    """True once `kill` was called. The end of its connection is reported a moment later."""

    @property
    def host(self) -> str:
        """The address of its host."""
        return self.peer.rpartition(":")[0]

    @property
    def pid(self) -> int | None:
        return None

    def describe_end(self) -> str:
        """How the process ended, in words for people. Called once the connection is lost."""
        reason = "" if self.connection.loss_reason is None else f": {self.connection.loss_reason}"
        return f"the connection to {self.peer} is lost{reason}"

    def kill(self) -> None:
        """Closes the connection. The process joins again when it notices."""
        self.is_killed = True
        self.connection.close()

    def refuse(self, reason: str) -> None:
        """Tells the process why it cannot join. It ends."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Refuse(reason))
            self.connection.wait_for_end(STOP_SECONDS)
        self.connection.close()

    def stop(self) -> None:
        """Asks the process to leave, and waits until it has."""
        with contextlib.suppress(ConnectionLost):
            self.connection.send(messages.Shutdown())
            self.connection.wait_for_end(STOP_SECONDS)  # an immediate close could arrive before the message
        self.connection.close()


class JoinListener:
    """Listens at `address`, tcp:HOST:PORT."""

    def __init__(self, address: str, secret: bytes, welcome: Callable[[RemoteProcess], None]) -> None:
        """welcome: called with each process that has passed the handshake, in a thread of its own.

        Raises ConfigError if it cannot listen there.
        """
        self._secret = secret
        self._link_tests = LinkTests()
        try:
            listening, location = addresses.bind(addresses.parse(address))
        except ConfigError as error:
            raise ConfigError(f"--cluster-address: {error}") from error
        self.address = str(location)
        """Address with the real port."""
        self._acceptor = Acceptor(listening, self.address, self._admit_peer, welcome, MAX_PENDING)

    @property
    def num_dropped(self) -> int:
        """Peers that were not accepted."""
        return self._acceptor.num_dropped

    def close(self) -> None:
        """Stops listening. A second call does nothing."""
        self._acceptor.close()

    def _admit_peer(self, sock: socket.socket) -> RemoteProcess:
        """Authenticates a peer and reads its first message. Raises for anything that is no process of
        moesaic."""
        host, port = sock.getpeername()[:2]
        _, keys = prove_as_server(sock, self._secret, Deadline(HANDSHAKE_SECONDS))
        with contextlib.ExitStack() as undo:
            connection = StreamConnection(wire(sock, keys), silent_limit=RULE.gone_while_starting)
            undo.callback(connection.close)
            message = connection.receive(HANDSHAKE_SECONDS)
            # Servers share experts by capacity, so NaN or infinity from one peer would spoil all shares.
            if not isinstance(message, messages.Enlist) or not 0 < message.capacity < math.inf:
                sent_type = "nothing" if message is None else type(message).__name__
                raise ConnectionLost(f"it sent {sent_type}, not Enlist with a positive capacity")
            if message.role == STANDBY:
                undo.pop_all()
                return RemoteProcess(connection, f"{host}:{port}", host_id=message.host, is_standby=True)
            role = _ROLES.get(message.role)
            if role is None:
                raise ConnectionLost(f"its role is {message.role[:40]!a}, not one of {', '.join(_ROLES)}")
            link = self._link_tests.link(message.host, connection)
            undo.pop_all()
            # A peer may send any text. Only names that this version knows are kept.
            sets = tuple(name for name in message.instruction_sets if name in _KERNELS)
            fields = message.capacity, message.host, sets, message.ticket, message.resident_experts
            parts = connection, f"{host}:{port}", role, *fields
            return RemoteProcess(*parts, link=link)
