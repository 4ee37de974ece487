"""The collectives of tensor-parallel attention, as one rank of a group calls them.

All ranks make the same calls in the same order. Of B rows of S bytes in equal shards, one of G ranks sends
this payload: reduce-scatter or all-gather (G - 1) B S / G, all-reduce 2 (G - 1) B S / G (Speculative MoE,
section 3.2). An all-to-all-v sends S for each row and each other rank that has experts of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.packets import FloatArray, Outgoing, Packet


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank has sent to other ranks, as its transport counted them."""

    all_reduce: int = 0
    reduce_scatter: int = 0
    all_gather: int = 0
    all_to_all: int = 0
    """Activations sent to experts, and the experts' outputs."""
    metadata: int = 0
    """Metadata of an all-to-all's activations, and notes."""
    messages: int = 0
    """Messages of the first rank to the others."""

    @property
    def payload(self) -> int:
        """All bytes except metadata and messages."""
        return self.all_reduce + self.reduce_scatter + self.all_gather + self.all_to_all

    def subtract(self, snapshot: Traffic) -> Traffic:
        """What was sent after `snapshot`."""
        return Traffic(
            **{
                field.name: getattr(self, field.name) - getattr(snapshot, field.name)
                for field in fields(Traffic)
            }
        )


class Group(Protocol):
    """The end of a group that one rank has. One thread uses it.

    Sums are computed in the order of the ranks, so all ranks and all runs get the same bits. Returned
    arrays belong to the caller, except those of `all_to_all_v` and `answer`: they may be memory of other
    ranks and are valid until the next call. Every call raises ConnectionLost as soon as a rank that it
    waits for is gone or has sent something that does not fit. It raises ConfigError for more data than the
    transport's round can hold.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent so far."""
        ...

    def all_reduce(self, rows: FloatArray) -> FloatArray:
        """Returns the sum of all ranks' addends, on every rank. All addends have the same shape."""
        ...

    def reduce_scatter(
        self, rows: FloatArray, sizes: Iterable[int] | None = None, order: IntArray | None = None
    ) -> FloatArray:
        """Each rank's addend [n, h] -> [sizes[rank], h] of the sum.

        Consecutive parts of rows[order] go to the ranks: sizes[r] rows to rank r. Rows are permuted on
        their way into the transport. None: `equal_sizes(n, ranks)`, and the batch's own order.
        """
        ...

    def all_gather(self, rows: FloatArray, order: IntArray | None = None) -> FloatArray:
        """Each rank's [sizes[r], h] -> [n, h] on every rank. The same `order` as in reduce_scatter restores
        the batch's order."""
        ...

    def all_to_all_v(self, outgoing: Sequence[Outgoing]) -> list[Packet]:
        """[ranks] rows for each rank, including this one -> [ranks] rows from each rank."""
        ...

    def answer(self, parts: Sequence[FloatArray], counts: Sequence[int]) -> list[FloatArray]:
        """The answers of an all-to-all: parts[r] [m, h] go to rank r, [counts[r], h] come from it. No
        metadata."""
        ...

    def gather_notes(self, notes: IntArray, order: IntArray) -> IntArray:
        """Each rank's [sizes[r]] small numbers about its rows -> [n] on every rank, in all_gather's order."""
        ...

    def announce(self, message: bytes) -> bytes:
        """Send rank 0's message to every rank. Messages of the other ranks are ignored."""
        ...

    def close(self) -> None:
        """Leave the group; the other ranks notice. A second call does nothing."""
        ...


def equal_sizes(count: int, ranks: int) -> list[int]:
    """`count` in parts that differ by at most one, the larger ones first.

    >>> equal_sizes(7, 3)
    [3, 2, 2]
    """
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]
