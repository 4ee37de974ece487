"""Rounds among peers: the symmetric part of a transport, in which each rank of a group sends to each rank.

    out = peers.open([0, 8])          memory for what goes to rank 0 and to rank 1
    out[1][:] = b"question"
    parts = peers.exchange()          what each rank sent to this one, once all of them have
    bytes(parts[1])

All ranks take part in every round, also when they send nothing. Only one thread at a time may use an end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from moesaic.core.errors import ConfigError, ConnectionLost

HALF_BYTES = 64 << 20
"""Default maximum of the bytes that a rank sends in a round. Memory is allocated when it is first written."""


class Peers(Protocol):
    """The end of a group that one rank has."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks so far. A part that all ranks read counts once for each of them."""
        ...

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        """[size] memory to write before `exchange`: sizes[r] bytes for rank r, also for the own rank.

        Raises ConfigError for more bytes than fit, and ConnectionLost if the group is known to be broken.
        """
        ...

    def open_for_all(self, count: int) -> memoryview:
        """Memory for one part of `count` bytes that goes to every rank. It raises the errors of `open`."""
        ...

    def exchange(self) -> list[memoryview]:
        """[size] what each rank sent to this one. The views are read-only and valid until the next
        `exchange`.

        Waits for every rank. Raises ConnectionLost as soon as a rank is gone that had not sent its part. That
        ends the group for all ranks.
        """
        ...

    def close(self) -> None:
        """Close this end, which the other ranks notice. A repeated call does nothing."""
        ...


def refuse(total: int, capacity: int) -> ConfigError:
    """The error of a round that is too large for the group's memory."""
    return ConfigError.field("bytes of a round", total, f"what fits into {capacity} bytes")


class _GroupState:
    """The state that the threads of a group share."""

    def __init__(self, size: int) -> None:
        self.condition = threading.Condition()
        self.posted_rounds = [0] * size
        # Two rounds: a rank may write the next one while others still read this one.
        self.parts: list[list[list[memoryview]]] = [[[] for _ in range(size)] for _ in range(2)]
        """[round % 2][sender][receiver] parts."""
        self.gone_ranks: set[int] = set()


class LocalPeers:
    """Peers that are threads of one process, for tests and for groups of one rank."""

    def __init__(self, state: _GroupState, rank: int, capacity: int) -> None:
        self._state, self._capacity, self._round = state, capacity, 0
        self.rank, self.size, self.sent_bytes = rank, len(state.posted_rounds), 0
        self._round_parts: list[memoryview] = []

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        self._check(sum(sizes))
        self._round_parts = [memoryview(bytearray(count)) for count in sizes]
        return self._round_parts

    def open_for_all(self, count: int) -> memoryview:
        self._check(count)
        self._round_parts = [memoryview(bytearray(count))] * self.size
        return self._round_parts[0]

    def exchange(self) -> list[memoryview]:
        state = self._state
        with state.condition:
            self._check(0)
            self._round += 1
            state.parts[self._round % 2][self.rank] = [part.toreadonly() for part in self._round_parts]
            state.posted_rounds[self.rank] = self._round
            state.condition.notify_all()
            self.sent_bytes += sum(map(len, self._round_parts)) - len(self._round_parts[self.rank])
            state.condition.wait_for(lambda: not self._missing() or self._missing() & state.gone_ranks)
            missing = self._missing() & state.gone_ranks
        if missing:
            self.close()
            raise ConnectionLost(f"rank {min(missing)} of the group is gone")
        return [parts[self.rank] for parts in state.parts[self._round % 2]]

    def close(self) -> None:
        with self._state.condition:
            self._state.gone_ranks.add(self.rank)
            self._state.condition.notify_all()

    def _missing(self) -> set[int]:
        return {
            rank for rank, posted_round in enumerate(self._state.posted_rounds) if posted_round < self._round
        }

    def _check(self, total: int) -> None:
        if self.rank in self._state.gone_ranks:
            raise ConnectionLost("this end of the group is closed")
        if total > self._capacity:
            raise refuse(total, self._capacity)


def local_peers(size: int, capacity: int = HALF_BYTES) -> list[LocalPeers]:
    """A group whose ranks are threads of this process."""
    state = _GroupState(size)
    return [LocalPeers(state, rank, capacity) for rank in range(size)]
