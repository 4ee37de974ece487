"""Connecting and listening: from an address and a secret to a Caller and an Answerer."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from pathlib import Path

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses
from moesaic.transport.authentication import (
    Deadline,
    Terms,
    check_secret,
    check_terms,
    prove_as_client,
    prove_as_server,
    read_exactly,
)
from moesaic.transport.calls import HEAP_BYTES, MAX_HEAP, Answerer, Caller
from moesaic.transport.sockets import StreamAnswerer, StreamCaller

try:
    from moesaic.transport import shm
except ImportError:  # installed without a compiler, or not on Linux
    shm = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_PENDING = 256
"""Handshakes at the same time; who comes then is dropped."""
_OK = b"+"


def connect(
    address: str,
    secret: bytes,
    kind: str = "stream",
    heap_bytes: int = HEAP_BYTES,
    timeout: float = HANDSHAKE_SECONDS,
) -> Caller:
    """A connection to the Listener at `address`.

    kind: "shm" shares memory and needs a Unix address, "stream" copies through the socket. heap_bytes: what
    the open calls of this connection may take together. timeout: seconds for all of it. Raises ConfigError
    for what can never work, ConnectionLost if the server is not there, is slow, or refuses.
    """
    where, terms = addresses.parse(address), Terms(kind, heap_bytes)
    check_secret(secret)
    check_terms(terms)
    if kind == "shm" and not where.path:
        raise ConfigError.field("kind", kind, "stream for a tcp: address; shm needs unix:")
    if kind == "shm" and shm is None:
        raise ConfigError.field("kind", kind, "stream: the compiled module moesaic.transport._shm is missing")
    deadline = Deadline(timeout)
    try:
        sock = addresses.dial(where, timeout)
    except OSError as error:
        raise ConnectionLost(f"no connection to {address}: {error.strerror or error}") from None
    try:
        prove_as_client(sock, secret, terms, deadline)
        return _share(sock, heap_bytes, deadline) if kind == "shm" else StreamCaller(sock, heap_bytes)
    except (OSError, ConnectionLost) as error:
        sock.close()
        raise ConnectionLost(f"no connection to {address}: {error}") from None


def _share(sock: socket.socket, heap_bytes: int, deadline: Deadline) -> Caller:
    """Make the segment, hand it over, and wait until the server has it."""
    mapping, descriptor = shm.make_segment(heap_bytes)
    try:
        caller = shm.ShmCaller(sock, mapping)  # writes the header before the server looks
        deadline.apply(sock)
        socket.send_fds(sock, [_OK], [descriptor])
        read_exactly(sock, len(_OK), deadline)
        sock.setblocking(False)
        return caller
    finally:
        os.close(descriptor)


class Listener:
    """Accepts and authenticates in the background; `accepted` hands over who passed.

    A peer that stalls, talks nonsense or does not know the secret is dropped with one line in the log, and
    holds up nobody else: each handshake has its own thread and deadline. Raises ConfigError if it cannot
    listen at `address`.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        max_heap_bytes: int = MAX_HEAP,
    ) -> None:
        check_secret(secret)
        self._secret, self._seconds, self._max_heap = secret, handshake_seconds, max_heap_bytes
        self._socket, where = addresses.bind(addresses.parse(address))
        self._socket.setblocking(False)
        self.address = str(where)
        """With the real port."""
        self._file = where.file
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._done: deque[Answerer] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="moesaic-listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Can be read while `accepted` has something."""
        return self._bell

    def accepted(self) -> list[Answerer]:
        """The connections that passed since the last call. Never blocks."""
        with self._lock:
            done = list(self._done)
            self._done.clear()
            if done:
                os.eventfd_read(self._bell)
        return done

    def close(self) -> None:
        """Stop listening and drop the handshakes; what `accepted` gave out stays. Again: nothing."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            pending = dict(self._pending)
            for sock in pending:
                _shut(sock)
        for thread in pending.values():
            thread.join()
        for answerer in self.accepted():
            answerer.close()
        self._socket.close()
        for descriptor in (self._bell, self._stop):
            os.close(descriptor)
        if self._file:
            Path(self._file).unlink(missing_ok=True)

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            if any(fd == self._stop for fd, _ in poller.poll()):
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                continue
            except OSError as error:  # no descriptors left: others may free some
                _log.warning("cannot accept at %s: %s", self.address, error.strerror or error)
                select.select([self._stop], [], [], 0.1)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        """A thread for one handshake, unless there are too many."""
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                thread = threading.Thread(target=self._welcome, args=(sock,), daemon=True)
                self._pending[sock] = thread
                thread.start()
                return
        sock.close()
        _log.warning("dropped a peer at %s: %d handshakes are under way", self.address, MAX_PENDING)

    def _welcome(self, sock: socket.socket) -> None:
        """One handshake: an Answerer, or one line in the log."""
        answerer: Answerer | None = None
        try:
            addresses.tune(sock)
            answerer = self._handshake(sock)
        except (OSError, ConnectionLost, ConfigError) as error:
            _log.warning("dropped a peer at %s: %s", self.address, error)
        finally:
            with self._lock:
                if answerer is None:
                    sock.close()
                else:
                    self._done.append(answerer)
                    if len(self._done) == 1:
                        os.eventfd_write(self._bell, 1)
                del self._pending[sock]

    def _handshake(self, sock: socket.socket) -> Answerer:
        if addresses.foreign(sock):
            raise ConnectionLost("a process of another user")
        deadline = Deadline(self._seconds)
        terms = prove_as_server(sock, self._secret, deadline)
        if terms.heap_bytes > self._max_heap:
            raise ConfigError.field("heap_bytes", terms.heap_bytes, f"at most {self._max_heap}")
        return (
            self._mapped(sock, terms, deadline)
            if terms.kind == "shm"
            else StreamAnswerer(sock, terms.heap_bytes)
        )

    def _mapped(self, sock: socket.socket, terms: Terms, deadline: Deadline) -> Answerer:
        """The end on the memory that the client sends."""
        if shm is None:
            raise ConnectionLost("a client asked for shared memory, and moesaic.transport._shm is missing")
        deadline.apply(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, len(_OK), 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if data != _OK or len(descriptors) != 1:
                raise ConnectionLost("the client sent no memory")
            answerer = shm.ShmAnswerer(sock, descriptors[0], terms.heap_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        deadline.apply(sock)
        sock.sendall(_OK)
        sock.setblocking(False)
        return answerer


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer closed first
