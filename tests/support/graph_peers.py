"""`TensorPeers` of threads with the device of `gpu_sanitizer`, whose exchanges its graphs can hold.

`ThreadPeers` checks what NCCL asks of the ranks: all of them record an exchange or none does, and a recorded
one is replayed with those that the other ranks recorded at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch

from tests.support.gpu_graphs import CAPTURED
from tests.support.gpu_sanitizer import numbers_of
from tests.support.thread_peers import ThreadPeers, nothing_sent


class GraphPeers(ThreadPeers):
    """One rank's end. `graph_peers` makes all of them."""

    capturable = True
    recorded = replayed = eager = 0
    """Exchanges so far."""

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        if CAPTURED.graph is None:
            self.eager += 1
            return super().exchange(rows, send, receive)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        given = numbers_of(rows), tuple(send), tuple(receive), numbers_of(out)
        CAPTURED.graph.work.append(partial(self._again, self.recorded, *given))
        self.recorded += 1
        return out

    def abort(self) -> None:
        """End the exchanges of all ranks."""
        self._meet.abort()

    def _again(
        self, number: int, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], out: torch.Tensor
    ) -> None:
        self.replayed += 1
        out.copy_(self._together(number, rows, send, receive))


def graph_peers(size: int) -> list[GraphPeers]:
    sent, meet = nothing_sent(size), threading.Barrier(size)
    return [GraphPeers(rank, sent, meet) for rank in range(size)]
