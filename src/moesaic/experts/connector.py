"""Connects to expert servers in the background, so that a frozen or distant server does not delay a step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from moesaic.config import HostTransport
from moesaic.core.errors import MoesaicError
from moesaic.core.experts import ServerEntry
from moesaic.transport.calls import Caller
from moesaic.transport.host import this_host
from moesaic.transport.listening import connect, kind_of
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
RETRY_SECONDS = 0.2


class Closable(Protocol):
    def close(self) -> None: ...


ConnectionT = TypeVar("ConnectionT", bound=Closable)


def return_unchanged(caller: Caller) -> Caller:
    """The connection itself."""
    return caller


class Connecting(Generic[ConnectionT]):
    """Tries to reach each server until it succeeds or is stopped."""

    def __init__(self, dial: Callable[[str, bytes], ConnectionT], wakeup: Wakeup) -> None:
        """Create one that has nothing to do yet.

        dial: makes a connection to an address with a secret, in a thread of its own. Raises MoesaicError or
        OSError. wakeup: rung when a connection was made.
        """
        self._dial = dial
        self._wakeup = wakeup
        self._connections: deque[tuple[ServerEntry, ConnectionT]] = deque()
        self._stop_events: dict[int, threading.Event] = {}
        self._stopping = threading.Lock()
        """So nothing is made any more once it was stopped."""

    def start(self, entry: ServerEntry, secret: bytes) -> None:
        """Connect to a server. An earlier attempt for the same id ends."""
        self.stop(entry.server)
        stop_event = self._stop_events[entry.server] = threading.Event()
        # A daemon thread: a server that does not answer must not keep the process alive.
        arguments = (entry, secret, stop_event)
        threading.Thread(target=self._connect, args=arguments, name="connecting", daemon=True).start()

    def stop(self, server: int) -> None:
        """Stop connecting to this server id."""
        stop_event = self._stop_events.pop(server, None)
        if stop_event is not None:
            with self._stopping:
                stop_event.set()

    def take_connections(self) -> list[tuple[ServerEntry, ConnectionT]]:
        """The connections made since the last call, except those that were stopped meanwhile."""
        connections = []
        while self._connections:
            connections.append(self._connections.popleft())
        return connections

    def _connect(self, entry: ServerEntry, secret: bytes, stop_event: threading.Event) -> None:
        address = entry.endpoint.address_for(this_host())
        while not stop_event.is_set():
            try:
                connection = self._dial(address, secret)
            except (MoesaicError, OSError) as error:
                LOG.debug("expert server %d at %s: %s", entry.server, address, error)
                # Not time.sleep: `stop` ends this wait at once.
                stop_event.wait(RETRY_SECONDS)
                continue
            with self._stopping:
                # Decided under the lock: once `stop` has returned, no connection is added.
                is_wanted = not stop_event.is_set()
                if is_wanted:
                    self._connections.append((entry, connection))
            if is_wanted:
                self._wakeup.ring()
            else:
                connection.close()
            return


class Connector(Connecting[Caller]):
    """Connects for calls."""

    def __init__(
        self,
        heap_bytes: int,
        wakeup: Wakeup,
        transport: HostTransport = "shm",
        wrap: Callable[[Caller], Caller] = return_unchanged,
    ) -> None:
        """heap_bytes: memory for the open calls of each connection. wakeup: rung when a connection was made.

        transport: to servers, see `HostTransport`. wrap: puts each connection into another one.
        """

        def dial(address: str, secret: bytes) -> Caller:
            kind = kind_of(transport, address)
            return wrap(connect(address, secret, kind, heap_bytes=heap_bytes))

        super().__init__(dial, wakeup)
