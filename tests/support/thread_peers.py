"""`TensorPeers` whose ranks are threads of this process, for tensors of any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from moesaic.core.errors import ConnectionLost

EAGER = -1
Sent = tuple[int, tuple[torch.Tensor, ...]]
"""The number of an exchange that graphs hold, or EAGER, and the rows for each rank."""


class ThreadPeers:
    """One rank's end. `thread_peers` makes all of them."""

    capturable = False

    def __init__(self, rank: int, sent: list[Sent], meet: threading.Barrier) -> None:
        self._rank, self._sent, self._meet = rank, sent, meet
        self._frees: list[Callable[[], None]] = []

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return self._together(EAGER, rows, send, receive)

    def when_closing(self, free: Callable[[], None]) -> None:
        self._frees.append(free)

    def close(self) -> None:
        frees, self._frees = self._frees, []
        for free in frees:
            free()
        self._meet.abort()

    def _together(
        self, number: int, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        assert rows.is_contiguous() and len(rows) == sum(send), "what torch.distributed asks for"
        try:
            self._sent[self._rank] = number, rows.split(list(send))
            self._meet.wait()
            numbers = [other for other, _ in self._sent]
            assert set(numbers) == {number}, f"the ranks are in different exchanges: {numbers}"
            parts = [parts[self._rank] for _, parts in self._sent]
            assert list(map(len, parts)) == list(receive)
            found = torch.cat(parts)
            self._meet.wait()
        except threading.BrokenBarrierError:
            raise ConnectionLost("a rank of the group is gone") from None
        return found


def nothing_sent(size: int) -> list[Sent]:
    return [(EAGER, ())] * size


def thread_peers(size: int) -> list[ThreadPeers]:
    sent, meet = nothing_sent(size), threading.Barrier(size)
    return [ThreadPeers(rank, sent, meet) for rank in range(size)]
