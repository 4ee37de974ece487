"""A connection beside memory that two processes write into by other means: it shows whether the peer lives.

Both ends say once who they are. Afterwards the client sends a byte when the server should look at that
memory, and the server says when the client may use it. Both notice at once when the other process ends.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.transport.authentication import Terms
from moesaic.transport.calls import MIN_HEAP, Answerer
from moesaic.transport.host_watch import watch
from moesaic.transport.listening import HANDSHAKE_SECONDS, Accept, ProvenPeer, dial
from moesaic.transport.sealed_socket import Wire, wire
from moesaic.transport.words import Word, hear, say

LOOK_SECONDS = 1e-3
"""An end looks at its socket at most this often."""
KIND = "nvshmem"
"""The kind of these connections, see `authentication.KINDS`."""
MOST_BYTES = 4096
"""Maximum bytes that are kept of what the peer sent."""


class Lifeline:
    """Is one end of the connection, after the handshake."""

    events = select.POLLIN

    def __init__(self, sock: socket.socket, sealed_wire: Wire, peer: dict[str, Any]) -> None:
        """sealed_wire: what the bytes of `sock` travel through. peer: what the other end said of itself."""
        sock.setblocking(False)
        self._socket, self._wire, self.peer = sock, sealed_wire, peer
        self._unread, self._next_look = bytearray(), 0.0
        self._memory = memoryview(bytearray(MOST_BYTES))
        self.loss: ConnectionLost | None = None
        """Why the peer is gone, once that is known."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end. A repeated call does nothing."""
        self.loss = self.loss or ConnectionLost("this end is closed")
        self._socket.close()

    def look(self, force: bool = False) -> bool:
        """Whether the peer is there, as was known LOOK_SECONDS ago at most. force: as is known now."""
        now = time.monotonic()
        if self.loss is None and (force or now >= self._next_look):
            self._next_look = now + LOOK_SECONDS
            self._read()
        return self.loss is None

    def take_received(self) -> bytes:
        """What `look` has found that the peer sent, since the last call."""
        message = bytes(self._unread)
        self._unread.clear()
        return message

    def send(self, message: bytes) -> None:
        """Send a few bytes. They are left out while the peer reads nothing, and when it is gone."""
        if self.loss is not None:
            return
        try:
            self._wire.send(memoryview(message))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.loss = ConnectionLost(f"the other end is gone: {error.strerror or error}")

    def wake(self) -> None:
        """Wake the peer."""
        self.send(b"+")

    def _read(self) -> None:
        try:
            while (count := self._wire.recv_into(self._memory)) > 0:
                self._unread += self._memory[:count]
                if len(self._unread) > MOST_BYTES:
                    del self._unread[:-MOST_BYTES]
            self.loss = ConnectionLost("the other end closed the connection")
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, DamagedMessage) as error:
            self.loss = ConnectionLost(f"the other end is gone: {error}")


Introduce = Callable[[Word], tuple[Word, Callable[[Lifeline], Answerer]]]
"""Takes what a client said of itself. Returns what the server says, and what makes its end. May raise
MoesaicError, which refuses the client."""


def connect_lifeline(
    address: str, secret: bytes, introduction: Word, timeout: float = HANDSHAKE_SECONDS
) -> Lifeline:
    """A lifeline to the Listener at `address`. introduction: what this client says of itself.

    Raises as `listening.connect` does, also where the server refuses who this is.
    """

    def make_end(server: ProvenPeer) -> Lifeline:
        sealed_wire = wire(server.sock, server.keys)
        watch(server.sock)
        server.deadline.apply(server.sock)
        say(sealed_wire, **introduction)
        return Lifeline(server.sock, sealed_wire, hear(sealed_wire))

    return dial(address, secret, Terms(KIND, MIN_HEAP), make_end, timeout)


def lifeline_kind(introduce: Introduce) -> dict[str, Accept]:
    """What a Listener needs to accept lifelines."""

    def accept(client: ProvenPeer) -> Answerer:
        watch(client.sock)
        sealed_wire = wire(client.sock, client.keys)
        client.deadline.apply(client.sock)
        server_word, make_answerer = introduce(word := hear(sealed_wire))
        say(sealed_wire, **server_word)
        return make_answerer(Lifeline(client.sock, sealed_wire, word))

    return {KIND: accept}
