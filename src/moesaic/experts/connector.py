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


Made = TypeVar("Made", bound=Closable)


def as_it_is(caller: Caller) -> Caller:
    """The connection itself."""
    return caller


class Connecting(Generic[Made]):
    """Tries to reach each server until it succeeds or is stopped."""

    def __init__(self, dial: Callable[[str, bytes], Made], wakeup: Wakeup) -> None:
        """Create one that has nothing to do yet.

        dial: makes a connection to an address with a secret, in a thread of its own. Raises MoesaicError or
        OSError. wakeup: rung when a connection was made.
        """
        self._dial = dial
        self._wakeup = wakeup
        self._made: deque[tuple[ServerEntry, Made]] = deque()
        self._wanted: dict[int, threading.Event] = {}
        self._stopping = threading.Lock()
        """So nothing is made any more once it was stopped."""

    def start(self, entry: ServerEntry, secret: bytes) -> None:
        """Connect to a server. An earlier attempt for the same id ends."""
        self.stop(entry.server)
        stopped = self._wanted[entry.server] = threading.Event()
        arguments = (entry, secret, stopped)
        threading.Thread(target=self._connect, args=arguments, name="connecting", daemon=True).start()

    def stop(self, server: int) -> None:
        """Stop connecting to this server id."""
        stopped = self._wanted.pop(server, None)
        if stopped is not None:
            with self._stopping:
                stopped.set()

    def made(self) -> list[tuple[ServerEntry, Made]]:
        """The connections made since the last call, except those that were stopped meanwhile."""
        found = []
        while self._made:
            found.append(self._made.popleft())
        return found

    def _connect(self, entry: ServerEntry, secret: bytes, stopped: threading.Event) -> None:
        address = entry.endpoint.address_for(this_host())
        while not stopped.is_set():
            try:
                made = self._dial(address, secret)
            except (MoesaicError, OSError) as error:
                LOG.debug("expert server %d at %s: %s", entry.server, address, error)
                stopped.wait(RETRY_SECONDS)
                continue
            with self._stopping:
                wanted = not stopped.is_set()
                if wanted:
                    self._made.append((entry, made))
            if wanted:
                self._wakeup.ring()
            else:
                made.close()
            return


class Connector(Connecting[Caller]):
    """Connects for calls."""

    def __init__(
        self,
        heap_bytes: int,
        wakeup: Wakeup,
        transport: HostTransport = "shm",
        wrap: Callable[[Caller], Caller] = as_it_is,
    ) -> None:
        """heap_bytes: memory for the open calls of each connection. wakeup: rung when a connection was made.

        transport: to servers, see `HostTransport`. wrap: puts each connection into another one.
        """

        def dial(address: str, secret: bytes) -> Caller:
            kind = kind_of(transport, address)
            return wrap(connect(address, secret, kind, heap_bytes=heap_bytes))

        super().__init__(dial, wakeup)
