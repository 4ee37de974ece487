"""Connects to expert servers in the background: one that is frozen or far away must not hold up a step."""

from __future__ import annotations

import logging
import threading
from collections import deque

from moesaic.config import HostTransport
from moesaic.core.errors import MoesaicError
from moesaic.core.experts import ServerEntry
from moesaic.transport.calls import Caller
from moesaic.transport.listening import connect
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
RETRY_SECONDS = 0.2


class Connector:
    """Tries until it is told to stop."""

    def __init__(self, heap_bytes: int, wakeup: Wakeup, transport: HostTransport = "shm") -> None:
        """heap_bytes: of each connection's open calls. bell: rung when a connection stands. transport: to
        servers with a Unix address; those with a TCP address are on other hosts.
        """
        self._transport = transport
        self._heap_bytes = heap_bytes
        self._wakeup = wakeup
        self._made: deque[tuple[ServerEntry, Caller]] = deque()
        self._wanted: dict[int, threading.Event] = {}

    def start(self, entry: ServerEntry, secret: bytes) -> None:
        """Connect to a server. Another attempt for the same id ends."""
        self.stop(entry.server)
        stopped = self._wanted[entry.server] = threading.Event()
        arguments = (entry, secret, stopped)
        threading.Thread(target=self._connect, args=arguments, name="connecting", daemon=True).start()

    def stop(self, server: int) -> None:
        """No connection to this id is wanted any more."""
        stopped = self._wanted.pop(server, None)
        if stopped is not None:
            stopped.set()

    def made(self) -> list[tuple[ServerEntry, Caller]]:
        """The connections that stand since the last call and are still wanted."""
        found = []
        while self._made:
            found.append(self._made.popleft())
        return found

    def _connect(self, entry: ServerEntry, secret: bytes, stopped: threading.Event) -> None:
        shared = self._transport == "shm" and entry.address.startswith("unix:")
        kind = "shm" if shared else "stream"
        while not stopped.is_set():
            try:
                caller = connect(entry.address, secret, kind, heap_bytes=self._heap_bytes)
            except (MoesaicError, OSError) as error:
                LOG.debug("expert server %d at %s: %s", entry.server, entry.address, error)
                stopped.wait(RETRY_SECONDS)
                continue
            if stopped.is_set():
                caller.close()
                return
            self._made.append((entry, caller))
            self._wakeup.ring()
            return
