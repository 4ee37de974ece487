"""Accepts peers in the background. Each has its own thread and deadline, so none delays another.

The log names the first peer that is dropped, then at most one in QUIET_SECONDS, and counts the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds before the next attempt to accept, after there was no descriptor or no thread for a peer."""
QUIET_SECONDS = 10.0
"""Minimum seconds between two lines about dropped peers."""

ResultT = TypeVar("ResultT")


class Acceptor(Generic[ResultT]):
    """Accepts on `listening`, which belongs to it from now on. `address` is the name for its log lines.

    handshake: called with the socket of a peer, in a thread of its own. It raises OSError, ConnectionLost or
    ConfigError for a peer to drop. A line in the log names the peer and the reason, or counts such peers.
    welcome: called in the same thread with the result of the handshake.
    max_pending: maximum handshakes at the same time. A further peer replaces the oldest one.
    """

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        handshake: Callable[[socket.socket], ResultT],
        welcome: Callable[[ResultT], None],
        max_pending: int,
    ) -> None:
        self.is_closed = False
        self.num_dropped = 0
        """Peers that were dropped."""
        self._drops, self._troubles = LineLimit(QUIET_SECONDS), LineLimit(QUIET_SECONDS)
        self._socket, self._address, self._max_pending = listening, address, max_pending
        self._handshake, self._welcome = handshake, welcome
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, str] = {}
        """Sockets of unfinished handshakes, oldest first, with the name of each peer."""
        self._threads: set[threading.Thread] = set()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name="moesaic-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop the handshakes.

        No peer is accepted afterwards. A repeated call does nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            for sock in self._pending:
                _shut_socket(sock)
            self._pending.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        for limit in (self._drops, self._troubles):
            _warn(limit.flush(time.monotonic()))
        self._socket.close()
        os.close(self._stop)

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        stopping = select.poll()  # select.select knows no descriptor of 1024 or more
        stopping.register(self._stop, select.POLLIN)
        while True:
            if any(fd == self._stop for fd, _ in poller.poll(1e3 * QUIET_SECONDS)):
                return
            with self._lock:
                _warn(self._drops.due(time.monotonic()))
            _warn(self._troubles.due(time.monotonic()))
            try:
                self._begin(*self._socket.accept())
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except (OSError, RuntimeError) as error:  # no descriptor or thread is free now
                reason = error.strerror if isinstance(error, OSError) else error
                _warn(self._troubles.add(f"cannot accept at {self._address}: {reason}", time.monotonic()))
                stopping.poll(1000 * RETRY_SECONDS)

    def _begin(self, sock: socket.socket, name: object) -> None:
        """Start the thread of one handshake, which replaces the oldest one if there are too many."""
        thread = threading.Thread(
            target=self._run_handshake, args=(sock,), name="moesaic-handshake", daemon=True
        )
        with self._lock, contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            peer = addresses.peer(sock, name)
            thread.start()
            undo.pop_all()
            if len(self._pending) >= self._max_pending:
                oldest = next(iter(self._pending))
                _shut_socket(oldest)
                self._drop(self._pending.pop(oldest), f"it was the oldest of {self._max_pending} handshakes")
            self._pending[sock] = peer
            self._threads.add(thread)

    def _run_handshake(self, sock: socket.socket) -> None:
        """Run one handshake. A failure is one line in the log."""
        try:
            addresses.tune(sock)
            result = self._handshake(sock)
        except (
            OSError,
            ConnectionLost,
            ConfigError,
            RuntimeError,
            MemoryError,
        ) as error:  # also no thread, no memory
            with self._lock:
                peer = self._pending.pop(sock, None)
                if peer is not None:  # otherwise it was dropped before
                    self._drop(peer, error)
                sock.close()
        else:
            with self._lock:
                self._pending.pop(sock, None)
            self._welcome(result)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _drop(self, peer: str, reason: object) -> None:
        """Count a peer that was dropped. Called with the lock."""
        self.num_dropped += 1
        _warn(self._drops.add(f"dropped {peer} at {self._address}: {reason}", time.monotonic()))


def _warn(line: str | None) -> None:
    if line is not None:
        _log.warning("%s", line)


def _shut_socket(sock: socket.socket) -> None:
    """Shut the socket down, which wakes the thread that reads from it."""
    with contextlib.suppress(OSError):  # the peer closed first
        sock.shutdown(socket.SHUT_RDWR)


class LineLimit:
    """Returns the lines to log: the first at once, then at most one in `seconds`, which counts the others.

    So a port scan does not fill the log. `now` is always the time in seconds on one monotonic clock.

    >>> limit = LineLimit(seconds=10.0)
    >>> limit.add("refused A", now=0.0)
    'refused A'
    >>> limit.add("refused B", now=1.0)
    >>> limit.add("refused C", now=2.0)
    >>> limit.due(now=10.0)
    'refused C (the last of 2 such lines in 10 s)'
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._log_time = -math.inf
        """Time of the last line."""
        self._pending_line, self._count = "", 0
        """The latest line that was not logged, and how many there are."""

    def add(self, line: str, now: float) -> str | None:
        """Add a line. Returns what to log now, or None."""
        if not self._count and now - self._log_time >= self._seconds:
            self._log_time = now
            return line
        self._pending_line, self._count = line, self._count + 1
        return self.due(now)

    def due(self, now: float) -> str | None:
        """The line for those that were held back, once it is time for it. None otherwise."""
        return self.flush(now) if now - self._log_time >= self._seconds else None

    def flush(self, now: float) -> str | None:
        """The line for those that were held back. None if there are none."""
        count, seconds = self._count, now - self._log_time
        if not count:
            return None
        self._log_time, self._count = now, 0
        if count == 1:
            return self._pending_line
        return f"{self._pending_line} (the last of {count} such lines in {math.ceil(seconds)} s)"
