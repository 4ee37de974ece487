"""The collectives of a group for rows that are tensors of the ranks' device.

Layouts and experts call these. `HostRows` sends rows through a Group, so those of a GPU go through RAM.
`DeviceRows` (in `tensor_rows.py`) leaves them on the device. Both move the same bytes and add in the order of
the ranks, so both give the same bits.

Question: How do the ranks of a group exchange rows, and do these go through RAM?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group, Traffic
from moesaic.experts.collectives.packets import FloatArray
from moesaic.experts.collectives.routing import Route, combine_pairs, dispatch
from moesaic.runtime.group.arrays import to_device, to_host


@dataclass(frozen=True)
class ArrivedPairs:
    """(row, expert) pairs that the ranks sent to this one, rank after rank."""

    hidden: torch.Tensor
    """[p, h] the row of each pair."""
    experts: IntArray
    """[p] logical ids."""
    counts: tuple[int, ...]
    """[ranks] pairs from each rank."""


class RowCollectives(Protocol):
    """The collectives that one rank calls from one thread. All ranks make the same calls in the same order.

    Every call raises ConnectionLost once a rank that it waits for is gone.
    """

    @property
    def group(self) -> Group:
        """The group of these ranks, for what is no row: messages, notes and its size."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent so far, also by `group`."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold an all-reduce, and the others of rows in the batch's order."""
        ...

    def count_replayed(self, traffic: Traffic) -> None:
        """Count the bytes of exchanges that a graph has carried out."""
        ...

    def when_closing(self, free: Callable[[], None]) -> None:
        """Call `free` before this end is closed. It destroys the graphs that hold exchanges."""
        ...

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' addends [n, h], on every rank."""
        ...

    def reduce_scatter(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        """Each rank's addend [n, h] -> [sizes[rank], h] of the sum.

        Consecutive parts of rows[order] go to the ranks. None: the batch's own order.
        """
        ...

    def all_gather(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        """Each rank's [sizes[rank], h] -> [n, h] on every rank. `order` is that of the reduce-scatter."""
        ...

    def dispatch(self, route: Route, hidden: torch.Tensor, weights: FloatArray) -> ArrivedPairs:
        """Send hidden [n, h] to the ranks of their experts. A row travels to a rank once. weights: [n, k]."""
        ...

    def combine(self, route: Route, answers: torch.Tensor, arrived_pairs: ArrivedPairs) -> torch.Tensor:
        """Send the answers [p, h] of the pairs back. Returns those of this rank's rows, [n, k, h]."""
        ...

    def close(self) -> None:
        """Leave the group; the other ranks notice. A second call does nothing."""
        ...


class HostRows:
    """`RowCollectives` through the memory of the host, or TCP between hosts. No graph can hold them."""

    capturable = False

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def traffic(self) -> Traffic:
        return self.group.traffic

    def count_replayed(self, traffic: Traffic) -> None:
        """Does nothing: no graph has sent anything."""

    def when_closing(self, free: Callable[[], None]) -> None:
        """Does nothing: no graph holds an exchange."""

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        return to_device(self.group.all_reduce(to_host(rows)), rows.device)

    def reduce_scatter(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        return to_device(self.group.reduce_scatter(to_host(rows), sizes, order), rows.device)

    def all_gather(
        self, rows: torch.Tensor, sizes: Sequence[int], order: IntArray | None = None
    ) -> torch.Tensor:
        gathered = self.group.all_gather(to_host(rows), order)
        # A rank that sent another number of rows computes another step, so the group cannot go on.
        if len(gathered) != sum(sizes):
            self.close()
            raise ConnectionLost(f"the ranks sent {len(gathered)} rows where {sum(sizes)} were expected")
        return to_device(gathered, rows.device)

    def dispatch(self, route: Route, hidden: torch.Tensor, weights: FloatArray) -> ArrivedPairs:
        packets = dispatch(self.group, route, to_host(hidden), weights)
        pairs = [packet.pairs for packet in packets]
        rows = np.concatenate([packet.hidden[row] for packet, (row, _) in zip(packets, pairs, strict=True)])
        experts = np.concatenate([ids for _, ids in pairs]).astype(np.int64)
        return ArrivedPairs(to_device(rows, hidden.device), experts, tuple(len(row) for row, _ in pairs))

    def combine(self, route: Route, answers: torch.Tensor, arrived_pairs: ArrivedPairs) -> torch.Tensor:
        parts = np.split(to_host(answers), np.cumsum(arrived_pairs.counts)[:-1])
        return to_device(combine_pairs(self.group, route, parts), answers.device)

    def close(self) -> None:
        self.group.close()
