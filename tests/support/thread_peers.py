"""`TensorPeers` whose ranks are threads of this process, for tensors of any device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from moesaic.core.errors import ConnectionLost


class ThreadPeers:
    """One rank's end. `thread_peers` makes all of them."""

    capturable = False

    def __init__(self, rank: int, sent: list[tuple[torch.Tensor, ...]], meet: threading.Barrier) -> None:
        self._rank, self._sent, self._meet = rank, sent, meet
        self._frees: list[Callable[[], None]] = []

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        assert rows.is_contiguous() and len(rows) == sum(send), "what torch.distributed asks for"
        try:
            self._sent[self._rank] = rows.split(list(send))
            self._meet.wait()
            parts = [sent[self._rank] for sent in self._sent]
            assert list(map(len, parts)) == list(receive)
            found = torch.cat(parts)
            self._meet.wait()
        except threading.BrokenBarrierError:
            raise ConnectionLost("a rank of the group is gone") from None
        return found

    def when_closing(self, free: Callable[[], None]) -> None:
        self._frees.append(free)

    def close(self) -> None:
        frees, self._frees = self._frees, []
        for free in frees:
            free()
        self._meet.abort()


def thread_peers(size: int) -> list[ThreadPeers]:
    sent: list[tuple[torch.Tensor, ...]] = [()] * size
    meet = threading.Barrier(size)
    return [ThreadPeers(rank, sent, meet) for rank in range(size)]
