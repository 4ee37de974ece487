"""Accepts peers in the background. Each peer has its own thread and deadline, so none delays another."""

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
"""Seconds between two attempts to accept, if there was no descriptor or no thread for a peer."""

Passed = TypeVar("Passed")


class Acceptor(Generic[Passed]):
    """Accepts connections on `listening`, which it then owns. `address` is its name in the log.

    handshake: called in a thread of the peer with its socket. It raises OSError, ConnectionLost or
    ConfigError for a peer that is to be dropped, which is logged in one line. welcome: called in that
    thread with the handshake's result. most: maximum number of handshakes at the same time; a further peer
    replaces the oldest one.
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
        """Handshakes under way, oldest first, with the names of the peers."""
        self._greeting: set[threading.Thread] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="moesaic-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop the handshakes. No peer is welcomed afterwards. A second call does
        nothing."""
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
            except (
                OSError,
                RuntimeError,
            ) as error:  # there is no descriptor or no thread; others may free one
                reason = error.strerror if isinstance(error, OSError) else error
                _log.warning("cannot accept at %s: %s", self._address, reason)
                select.select([self._stop], [], [], RETRY_SECONDS)

    def _begin(self, sock: socket.socket, name: object) -> None:
        """Start a thread for one handshake, in place of the oldest if there are too many."""
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
        """Run one handshake: welcome the peer, or log why not."""
        try:
            addresses.tune(sock)
            passed = self._handshake(sock)
        except (
            OSError,
            ConnectionLost,
            ConfigError,
            RuntimeError,
            MemoryError,
        ) as error:  # no thread, or no room
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
    """Wake the thread that reads from the socket."""
    with contextlib.suppress(OSError):  # the peer closed first
        sock.shutdown(socket.SHUT_RDWR)
