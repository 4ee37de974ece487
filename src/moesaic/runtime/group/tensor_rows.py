"""Collectives whose rows stay on the device. Only the host's metadata about them goes through the group.

There is one primitive, an all-to-all of rows. The ranks add up what arrived by themselves, in their order. So
sums have the bits of `HostRows`, whoever moves the rows: NCCL's own all-reduce adds in an order of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group, Traffic, equal_sizes
from moesaic.experts.collectives.packets import FloatArray
from moesaic.experts.collectives.routing import Route, dispatch
from moesaic.kernels.moving import move_array
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.runtime.group.rows import ArrivedPairs


class TensorPeers(Protocol):
    """The end of one rank, by which the ranks of a group exchange tensors."""

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Send consecutive parts of `rows` [sum(send), ...] to the ranks, send[r] rows to rank r.

        Returns [sum(receive), ...]: receive[r] rows from each rank r, rank after rank. The own part is among
        them. On a GPU the host does not wait. Raises ConnectionLost if a rank is known to be gone.
        """
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold an exchange. All ranks then replay their graphs in the same order."""
        ...

    def when_closing(self, free: Callable[[], None]) -> None:
        """Call `free` before this end is closed. It destroys the graphs that hold exchanges."""
        ...

    def close(self) -> None:
        """Close this end, which the other ranks notice. A second call does nothing."""
        ...


class DeviceRows:
    """`RowCollectives` over any TensorPeers, which it owns as it owns the group."""

    def __init__(self, group: Group, peers: TensorPeers, kernels: Kernels = REFERENCE) -> None:
        """kernels: compute what is left to a rank: they permute rows, and add them up in rank order."""
        self.group, self._peers, self._kernels = group, peers, kernels
        self._sent_bytes = Counter[str]()

    @property
    def traffic(self) -> Traffic:
        return Traffic(**Counter(asdict(self.group.traffic)) + self._sent_bytes)

    @property
    def capturable(self) -> bool:
        return self._peers.capturable

    def count_replayed(self, traffic: Traffic) -> None:
        self._sent_bytes.update(asdict(traffic))

    def when_closing(self, free: Callable[[], None]) -> None:
        self._peers.when_closing(free)

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        ranks = self.group.size
        flat, sizes = rows.reshape(-1), equal_sizes(rows.numel(), ranks)
        copies = self._sum("all_reduce", flat, sizes, copies=ranks)
        return self._gather("all_reduce", copies, sizes).view(rows.shape)

    def reduce_scatter(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        if order is not None:
            rows = self._kernels.permute_rows(rows, move_array(order, rows.device))
        return self._sum("reduce_scatter", rows, sizes)

    def all_gather(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        copies = self._kernels.sum_ranks(rows, 1, self.group.size)
        gathered = self._gather("all_gather", copies, sizes)
        return (
            gathered
            if order is None
            else self._kernels.restore_rows(gathered, move_array(order, rows.device))
        )

    def dispatch(self, route: Route, hidden: torch.Tensor, weights: FloatArray) -> ArrivedPairs:
        """The ranks exchange packets without rows through the host first, so each knows what arrives."""
        ranks, device = range(self.group.size), hidden.device
        packets = dispatch(self.group, route, np.empty((len(hidden), 0), np.float32), weights)
        pairs = [packet.pairs for packet in packets]
        experts = np.concatenate([ids for _, ids in pairs]).astype(np.int64)
        # A row is sent to a rank once, however many of its experts are there.
        receive = [len(packet.rows) for packet in packets]
        rows_of_ranks = [route.rows(rank) for rank in ranks]
        outgoing = hidden.index_select(0, move_array(np.concatenate(rows_of_ranks), device))
        incoming = self._exchange("all_to_all", outgoing, list(map(len, rows_of_ranks)), receive)
        starts = np.cumsum([0, *receive])
        places = np.concatenate([starts[rank] + row for rank, (row, _) in enumerate(pairs)])
        counts = tuple(len(row) for row, _ in pairs)
        return ArrivedPairs(incoming.index_select(0, move_array(places, device)), experts, counts)

    def combine(self, route: Route, answers: torch.Tensor, arrived_pairs: ArrivedPairs) -> torch.Tensor:
        pairs = [route.pairs(rank) for rank in range(self.group.size)]
        top_k, counts = route.owners.shape[1], [len(row) for row, _ in pairs]
        returned_rows = self._exchange("all_to_all", answers, arrived_pairs.counts, counts)
        places = move_array(np.concatenate([row * top_k + slot for row, slot in pairs]), answers.device)
        ordered_rows = torch.empty_like(returned_rows).index_copy_(0, places, returned_rows)
        return ordered_rows.view(*route.owners.shape, answers.shape[1])

    def close(self) -> None:
        self._peers.close()
        self.group.close()

    def _sum(self, kind: str, rows: torch.Tensor, sizes: Sequence[int], copies: int = 1) -> torch.Tensor:
        """Copies of this rank's part of the sum of all ranks' addends, added in the order of the ranks."""
        ranks = self.group.size
        addends = self._exchange(kind, rows, sizes, [sizes[self.group.rank]] * ranks)
        return self._kernels.sum_ranks(addends, ranks, copies)

    def _gather(self, kind: str, copies: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """All ranks' rows. copies: this rank's, once for each rank."""
        ranks = self.group.size
        return self._exchange(kind, copies, [len(copies) // ranks] * ranks, sizes)

    def _exchange(
        self, kind: str, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> torch.Tensor:
        row_bytes = rows.element_size() * rows[:1].numel()
        self._sent_bytes[kind] += row_bytes * (len(rows) - send[self.group.rank])
        # Peers send memory as it lies, so rows have to be contiguous.
        return self._peers.exchange(rows.contiguous(), send, receive)
