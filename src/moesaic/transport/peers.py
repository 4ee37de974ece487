"""Rounds among peers: the symmetric half of a transport, in which each rank of a group sends to each other.

    out = peers.open([0, 8])          memory for what goes to rank 0 and to rank 1
    out[1][:] = b"question"
    parts = peers.exchange()          what each rank sent to this one, once all of them have
    bytes(parts[1])

All ranks take part in every round, even when they send nothing. One thread at a time uses an end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from moesaic.core.errors import ConfigError, ConnectionLost

HALF_BYTES = 64 << 20
"""Default of the bytes that a rank can send in a round. Memory is used when it is first written."""


class Peers(Protocol):
    """One rank's end of a group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def sent(self) -> int:
        """Bytes sent to other ranks so far. A part that all ranks read counts once for each of them."""
        ...

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        """[size] memory to be written before `exchange`: sizes[r] bytes for rank r, including this rank.

        Raises ConfigError for more than fits, and ConnectionLost if the group is known to be broken.
        """
        ...

    def open_for_all(self, count: int) -> memoryview:
        """Memory for one part of `count` bytes that goes to every rank."""
        ...

    def exchange(self) -> list[memoryview]:
        """[size] what each rank sent to this one, read-only, valid until the next `exchange` begins.

        Waits for every rank. Raises ConnectionLost as soon as a rank is gone that had not sent its part.
        The group is then over for all ranks.
        """
        ...

    def close(self) -> None:
        """Leave the group; the other ranks notice. A second call does nothing."""
        ...


def refuse(total: int, capacity: int) -> ConfigError:
    """The error for a round that can never be opened."""
    return ConfigError.field("bytes of a round", total, f"what fits into {capacity} bytes")


class _Room:
    """The memory that the threads of a group share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.posted = [0] * size
        self.parts: list[list[list[memoryview]]] = [[[] for _ in range(size)] for _ in range(2)]
        """By the round's parity and the sender: the part for each receiver."""
        self.gone: set[int] = set()


class LocalPeers:
    """Peers that are threads of one process, for tests and for groups of one."""

    def __init__(self, room: _Room, rank: int, capacity: int) -> None:
        self._room, self._capacity, self._round = room, capacity, 0
        self.rank, self.size, self.sent = rank, len(room.posted), 0
        self._opened: list[memoryview] = []

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        self._check(sum(sizes))
        self._opened = [memoryview(bytearray(count)) for count in sizes]
        return self._opened

    def open_for_all(self, count: int) -> memoryview:
        self._check(count)
        self._opened = [memoryview(bytearray(count))] * self.size
        return self._opened[0]

    def exchange(self) -> list[memoryview]:
        room = self._room
        with room.changed:
            self._check(0)
            self._round += 1
            room.parts[self._round % 2][self.rank] = [part.toreadonly() for part in self._opened]
            room.posted[self.rank] = self._round
            room.changed.notify_all()
            self.sent += sum(map(len, self._opened)) - len(self._opened[self.rank])
            room.changed.wait_for(lambda: not self._missing() or self._missing() & room.gone)
            missing = self._missing() & room.gone
        if missing:
            self.close()
            raise ConnectionLost(f"rank {min(missing)} of the group is gone")
        return [parts[self.rank] for parts in room.parts[self._round % 2]]

    def close(self) -> None:
        with self._room.changed:
            self._room.gone.add(self.rank)
            self._room.changed.notify_all()

    def _missing(self) -> set[int]:
        return {rank for rank, posted in enumerate(self._room.posted) if posted < self._round}

    def _check(self, total: int) -> None:
        if self.rank in self._room.gone:
            raise ConnectionLost("this end of the group is closed")
        if total > self._capacity:
            raise refuse(total, self._capacity)


def local_peers(size: int, capacity: int = HALF_BYTES) -> list[LocalPeers]:
    """A group whose ranks are threads of this process."""
    room = _Room(size)
    return [LocalPeers(room, rank, capacity) for rank in range(size)]
