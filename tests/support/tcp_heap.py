"""A symmetric heap between processes that share no memory, by TCP: as hard on its users as NVSHMEM may be.

- A put takes effect late. Its source is read in pieces, each after a while. So whoever overwrites a source
  too early sends what it did not mean to.
- Pieces arrive in any order, and so do the puts of one process to another. Only the word of a put comes after
  its own bytes.
- Puts to a process that has ended vanish. Those to a process that is frozen wait, and hold up no others.

Each process has a connection to each other one, and to itself. A connection has a thread that sends and one
that receives.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

LOG = logging.getLogger(__name__)
LATE = 0.001
"""Seconds until a source is read, at most."""
FLYING = 16
"""Puts of a process to another that are sent at a time."""
PIECES = 4
"""A put has at most so many."""
_BYTES, _WORD, _SEEN = range(3)
_HEAD = struct.Struct("<BQq")
"""What it is; the place; and the bytes that follow, the number of the word, or the puts that have arrived."""


@dataclass
class Put:
    """Bytes and a word on their way."""

    target: int
    source: int
    size: int
    signal: int
    number: int
    due: float
    """When the first piece may be read."""
    copied: bytes | None
    """The bytes, where the source was read already."""
    pieces: list[tuple[int, int]]
    """Begin and end of what is not sent yet."""


class TcpHeap:
    """The own part of the memory, and the connections to the others. Any thread may call it."""

    def __init__(self, pe: int, size: int, late: float, seed: int) -> None:
        """late: seconds. seed: of delays and orders."""
        self.pe, self.memory, self.late, self.seed = pe, np.zeros(size, np.uint8), late, seed
        self.links: dict[int, Link] = {}
        """By the number of the process at the other end."""
        self.connections: dict[int, socket.socket] = {}
        """To the other processes, before `start`."""

    @property
    def address(self) -> int:
        """Of the own part, in this process."""
        return self.memory.ctypes.data

    def start(self) -> None:
        """Receive and send, once all are connected."""
        mine, back = socket.socketpair()
        self._echo = Link(self, back, -1)
        ends = sorted((self.connections | {self.pe: mine}).items())
        self.links = {pe: Link(self, connection, pe) for pe, connection in ends}

    def put(
        self, target: int, source: int, size: int, signal: int, number: int, pe: int, copied: bool = False
    ) -> None:
        """Bytes of the own part at `source` to the place `target` of the process `pe`, then `number` into its
        word at `signal`. Does not wait. copied: the source may change as soon as this returns."""
        self.check(target, size)
        self.check(source, size)
        self.check(signal, 8)
        assert signal % 8 == 0, f"a word at {signal}"
        assert pe in self.links, f"process {pe} of {len(self.links)}"
        taken = self.memory[source : source + size].tobytes() if copied else None
        self.links[pe].put(Put(target, source, size, signal, number, 0.0, taken, []))

    def check(self, place: int, size: int) -> None:
        """Raises AssertionError for what is not in the heap."""
        inside = min(place, size) >= 0 and place + size <= len(self.memory)
        assert inside, f"{size} bytes at {place} of a heap of {len(self.memory)}"

    def word(self, place: int) -> int:
        """The own word there, as it is now. It is unsigned."""
        self.check(place, 8)
        assert place % 8 == 0, f"a word at {place}"
        return int(self.memory[place : place + 8].view(np.uint64)[0])

    def quiet(self) -> None:
        """Wait until all puts have arrived, but for those to processes that have ended."""
        for link in self.links.values():
            link.quiet()

    def close(self) -> None:
        """End the connections. Puts that have not been sent vanish."""
        for link in (*self.links.values(), self._echo):
            link.close()


class Link:
    """A connection between two processes of a job."""

    def __init__(self, heap: TcpHeap, connection: socket.socket, pe: int) -> None:
        """pe: of the process at the other end."""
        self._heap, self._connection, self._pe = heap, connection, pe
        self._random = random.Random(f"{heap.seed} {heap.pe} {pe}")
        self._changed = threading.Condition()
        self._waiting: list[Put] = []
        self._flying: list[Put] = []
        """Of the thread that sends."""
        self._unseen = 0
        """Puts that the other process has not said to have."""
        self._owed = 0
        """Puts that came and of which the other process has not been told."""
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"PE {heap.pe} and {pe}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, one: Put) -> None:
        one.due = time.monotonic() + self._random.uniform(0, self._heap.late)
        one.pieces = list(self._cut(one.size))
        with self._changed:
            if self._ended:
                LOG.debug("a put to process %s, which has ended", self._pe)
                return
            self._waiting.append(one)
            self._unseen += 1
            self._changed.notify_all()

    def quiet(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._unseen)

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _cut(self, size: int) -> Iterator[tuple[int, int]]:
        """Pieces of so many bytes, in any order."""
        if size:
            marks = {self._random.randrange(size) for _ in range(self._random.randrange(PIECES))}
            pieces = list(itertools.pairwise(sorted({0, size} | marks)))
            self._random.shuffle(pieces)
            yield from pieces

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            LOG.debug("process %s has ended: %s", self._pe, error)
        self._end()  # and the other thread ends too

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    # ---- sending

    def _send(self) -> None:
        while True:
            with self._changed:
                told, self._owed = self._owed, 0
                self._take_off()
                now = time.monotonic()
                ready = [one for one in self._flying if one.due <= now]
                if not ready and not told and not self._ended:
                    dues = [one.due - now for one in self._flying]
                    self._changed.wait(min(dues, default=None))
                    continue
                if self._ended:
                    return
            if told:
                self._connection.sendall(_HEAD.pack(_SEEN, 0, told))
            if ready:
                self._go_on(self._random.choice(ready))

    def _take_off(self) -> None:
        """Send more puts at a time, out of all that wait."""
        while self._waiting and len(self._flying) < FLYING:
            self._flying.append(self._waiting.pop(self._random.randrange(min(FLYING, len(self._waiting)))))

    def _go_on(self, one: Put) -> None:
        """Send the next piece of this put, or its word."""
        if not one.pieces:
            self._flying.remove(one)
            self._connection.sendall(_HEAD.pack(_WORD, one.signal, one.number))
            return
        begin, end = one.pieces.pop()
        if one.copied is not None:
            piece = one.copied[begin:end]
        else:
            piece = self._heap.memory[one.source + begin : one.source + end].tobytes()
        one.due = time.monotonic() + self._random.uniform(0, self._heap.late / PIECES)
        self._connection.sendall(_HEAD.pack(_BYTES, one.target + begin, end - begin) + piece)

    # ---- receiving

    def _receive(self) -> None:
        while True:
            kind, place, number = _HEAD.unpack(self._exactly(_HEAD.size))
            if kind == _SEEN:
                with self._changed:
                    self._unseen -= number
                    self._changed.notify_all()
            elif kind == _WORD:
                self._heap.memory[place : place + 8].view(np.int64)[0] = number
                with self._changed:
                    self._owed += 1
                    self._changed.notify_all()
            else:
                self._heap.check(place, number)
                self._heap.memory[place : place + number] = np.frombuffer(self._exactly(number), np.uint8)

    def _exactly(self, size: int) -> bytes:
        return exactly(self._connection, size)


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionError if the other side has ended."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return bytes(found)
