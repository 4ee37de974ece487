"""`TensorPeers` of threads with the device of `gpu_sanitizer`, whose exchanges its graphs can hold.

`ThreadPeers` checks what NCCL asks of the ranks: all of them record an exchange or none does, and a recorded
one is replayed with those that the other ranks recorded at the same time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group
from moesaic.kernels import table
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.runtime.group.tensor_rows import DeviceRows
from tests.support.gpu_graphs import CAPTURED, Graph
from tests.support.gpu_sanitizer import in_thread, numbers_of
from tests.support.thread_peers import Sent, ThreadPeers, nothing_sent


class GraphPeers(ThreadPeers):
    """One rank's end. `graph_peers` makes all of them."""

    def __init__(self, rank: int, sent: list[Sent], meet: threading.Barrier) -> None:
        super().__init__(rank, sent, meet)
        self._graphs = weakref.WeakSet[Graph]()

    capturable = True
    recorded = replayed = 0
    """Exchanges so far."""
    last: int | None = None
    """The number of replayed exchanges after which this rank is gone."""

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        if CAPTURED.graph is None:
            return super().exchange(rows, send, receive)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        given = numbers_of(rows), tuple(send), tuple(receive), numbers_of(out)
        self._graphs.add(CAPTURED.graph)
        CAPTURED.graph.work.append(partial(self._again, self.recorded, *given))
        self.recorded += 1
        return out

    def close(self) -> None:
        """NCCL waits here until no graph holds an exchange."""
        super().close()
        assert not any(graph.work for graph in self._graphs), "a graph outlives the connection"

    def abort(self) -> None:
        """End the exchanges of all ranks."""
        self._meet.abort()

    def _again(
        self, number: int, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], out: torch.Tensor
    ) -> None:
        if self.replayed == self.last:
            raise ConnectionLost("this rank is gone")
        self.replayed += 1
        out.copy_(self._together(number, rows, send, receive))


def graph_peers(size: int) -> list[GraphPeers]:
    sent, meet = nothing_sent(size), threading.Barrier(size)
    return [GraphPeers(rank, sent, meet) for rank in range(size)]


def ranks_in_threads(
    nccl: bool, size: int
) -> tuple[list[GraphPeers], Callable[..., RowCollectives], Callable[[], AbstractContextManager[None]]]:
    """The ends of ranks with Triton's kernels, what connects one, and the context of its thread.

    nccl: graphs can hold their exchanges.
    """
    ends, kernels = graph_peers(size), table.pick("cuda", "triton")

    def connect(config: WorkerConfig, group: Group) -> RowCollectives:
        return DeviceRows(group, ends[group.rank], kernels) if nccl else HostRows(group)

    @contextmanager
    def within() -> Iterator[None]:
        with in_thread(), np.errstate(all="ignore"):
            try:
                yield
            except BaseException:
                ends[0].abort()  # so that the others do not wait for this rank
                raise

    return ends, connect, within
