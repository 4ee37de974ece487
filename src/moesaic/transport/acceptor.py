"""Accepting peers in the background: each has its own thread and deadline, and none holds up another."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between two attempts to accept, where there is no descriptor or no thread for a peer."""

Passed = TypeVar("Passed")


class Acceptor(Generic[Passed]):
    """Accepts on `listening`, which it owns from now on; `address` is its name in the log.

    handshake: called in a thread of the peer's with its socket. Raises OSError, ConnectionLost or ConfigError
    for a peer that is to be dropped: one line in the log names it. welcome: called there with what was
    returned. most: handshakes at the same time; who comes then takes the place of the one that came first.
    """

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        handshake: Callable[[socket.socket], Passed],
        welcome: Callable[[Passed], None],
        most: int,
    ) -> None:
        self.closed = False
        self._socket, self._address, self._most = listening, address, most
        self._handshake, self._welcome = handshake, welcome
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, str] = {}
        """Handshakes under way, oldest first: who is there."""
        self._greeting: set[threading.Thread] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="moesaic-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop the handshakes; nobody is welcomed afterwards. Again: nothing."""
        if self.closed:
            return
        self.closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            for sock in self._pending:
                _shut(sock)
            self._pending.clear()
            greeting = list(self._greeting)
        for thread in greeting:
            thread.join()
        self._socket.close()
        os.close(self._stop)

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            if any(fd == self._stop for fd, _ in poller.poll()):
                return
            try:
                self._begin(*self._socket.accept())
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except (OSError, RuntimeError) as error:  # no descriptor or no thread: others may free some
                reason = error.strerror if isinstance(error, OSError) else error
                _log.warning("cannot accept at %s: %s", self._address, reason)
                select.select([self._stop], [], [], RETRY_SECONDS)

    def _begin(self, sock: socket.socket, name: object) -> None:
        """A thread for one handshake, in place of the oldest if there are too many."""
        thread = threading.Thread(target=self._greet, args=(sock,), name="moesaic-handshake", daemon=True)
        with self._lock, contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            peer = addresses.peer(sock, name)
            thread.start()
            undo.pop_all()
            if len(self._pending) >= self._most:
                oldest = next(iter(self._pending))
                _shut(oldest)
                self._drop(self._pending.pop(oldest), f"{self._most} handshakes are under way, it came first")
            self._pending[sock] = peer
            self._greeting.add(thread)

    def _greet(self, sock: socket.socket) -> None:
        """One handshake: a welcome, or one line in the log."""
        try:
            addresses.tune(sock)
            passed = self._handshake(sock)
        except (
            OSError,
            ConnectionLost,
            ConfigError,
            RuntimeError,
            MemoryError,
        ) as error:  # no thread, no room
            with self._lock:
                peer = self._pending.pop(sock, None)
                if peer is not None:  # else it was dropped before
                    self._drop(peer, error)
                sock.close()
        else:
            with self._lock:
                self._pending.pop(sock, None)
            self._welcome(passed)
        finally:
            with self._lock:
                self._greeting.discard(threading.current_thread())

    def _drop(self, peer: str, why: object) -> None:
        _log.warning("dropped %s at %s: %s", peer, self._address, why)


def _shut(sock: socket.socket) -> None:
    """Wakes the thread that reads from it."""
    with contextlib.suppress(OSError):  # the peer closed first
        sock.shutdown(socket.SHUT_RDWR)
