"""A connection beside memory that two processes write into by other means: it shows whether the peer lives.

Both ends say once who they are. Afterwards the client sends a byte when the server should look at that
memory, and the server says when the client may use it. Both notice at once when the other process ends.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.transport.sealed_socket import Wire

LOOK_SECONDS = 1e-3
"""An end looks at its socket at most this often."""
MOST_BYTES = 4096
"""Maximum bytes that are kept of what the peer sent."""


class Lifeline:
    """One end, after the handshake."""

    events = select.POLLIN

    def __init__(self, sock: socket.socket, sealed: Wire, peer: dict[str, Any]) -> None:
        """sealed: what the bytes of `sock` travel through. peer: what the other end said of itself."""
        sock.setblocking(False)
        self._socket, self._wire, self.peer = sock, sealed, peer
        self._received, self._next_look = bytearray(), 0.0
        self._memory = memoryview(bytearray(MOST_BYTES))
        self.lost: ConnectionLost | None = None
        """Why the peer is gone, once that is known."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end. A repeated call does nothing."""
        self.lost = self.lost or ConnectionLost("this end is closed")
        self._socket.close()

    def look(self, at_once: bool = False) -> bool:
        """Whether the peer is there, as was known LOOK_SECONDS ago at most. at_once: as is known now."""
        now = time.monotonic()
        if self.lost is None and (at_once or now >= self._next_look):
            self._next_look = now + LOOK_SECONDS
            self._read()
        return self.lost is None

    def received(self) -> bytes:
        """What `look` has found that the peer sent, since the last call."""
        found = bytes(self._received)
        self._received.clear()
        return found

    def send(self, message: bytes) -> None:
        """Send a few bytes. They are left out while the peer reads nothing, and when it is gone."""
        if self.lost is not None:
            return
        try:
            self._wire.send(memoryview(message))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.lost = ConnectionLost(f"the other end is gone: {error.strerror or error}")

    def wake(self) -> None:
        """Wake the peer."""
        self.send(b"+")

    def _read(self) -> None:
        try:
            while (count := self._wire.recv_into(self._memory)) > 0:
                self._received += self._memory[:count]
                if len(self._received) > MOST_BYTES:
                    del self._received[:-MOST_BYTES]
            self.lost = ConnectionLost("the other end closed the connection")
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, DamagedMessage) as error:
            self.lost = ConnectionLost(f"the other end is gone: {error}")
