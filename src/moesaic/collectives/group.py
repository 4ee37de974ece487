"""The collectives of attention under tensor parallelism: what a rank's end of a group can do.

All ranks make the same calls in the same order. Payload that one of G ranks sends for B rows of S bytes, in
equal shards: reduce-scatter or all-gather (G - 1) B S / G, all-reduce 2 (G - 1) B S / G (Speculative MoE,
section 3.2); an all-to-all-v S for each row and other rank that has experts of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moesaic.collectives.packets import FloatArray, Outgoing, Packet
from moesaic.core.tokens import IntArray


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank has sent to other ranks, as its transport counted them."""

    all_reduce: int = 0
    reduce_scatter: int = 0
    all_gather: int = 0
    all_to_all: int = 0
    """Activations there, and answers back."""
    metadata: int = 0
    """What goes with the activations of an all-to-all, and notes."""
    messages: int = 0
    """What the first rank said to the others."""

    @property
    def payload(self) -> int:
        """All but metadata and messages."""
        return self.all_reduce + self.reduce_scatter + self.all_gather + self.all_to_all


class Group(Protocol):
    """One rank's end, used by one thread.

    Sums are taken in the order of the ranks: all ranks, and all runs, get the same bits. Arrays that come
    back are the caller's, but for those of `all_to_all_v` and `answer`: they may be other ranks' memory, and
    hold until the next call. Every call raises ConnectionLost as soon as a rank it waits for is gone or
    has sent what does not fit, and ConfigError for more than the transport's round can hold.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic:
        """So far."""
        ...

    def all_reduce(self, rows: FloatArray) -> FloatArray:
        """Each rank's addend, of one shape -> their sum, on every rank."""
        ...

    def reduce_scatter(
        self, rows: FloatArray, sizes: Iterable[int] | None = None, order: IntArray | None = None
    ) -> FloatArray:
        """Each rank's addend [n, h] -> [sizes[rank], h] of the sum.

        The places of rows[order] are dealt out, sizes[r] of them to rank after rank; rows are permuted on
        their way into the transport. None: `equal_sizes(n, ranks)`, and the batch's own order.
        """
        ...

    def all_gather(self, rows: FloatArray, order: IntArray | None = None) -> FloatArray:
        """Each rank's [sizes[r], h] -> [n, h] on every rank. The same `order` undoes reduce_scatter's."""
        ...

    def all_to_all_v(self, outgoing: Sequence[Outgoing]) -> list[Packet]:
        """[ranks] what goes to each, the own rank among them -> [ranks] what came from each."""
        ...

    def answer(self, parts: Sequence[FloatArray], counts: Sequence[int]) -> list[FloatArray]:
        """The way back: parts[r] [m, h] go to rank r, [counts[r], h] come from it. No metadata."""
        ...

    def gather_notes(self, notes: IntArray, order: IntArray) -> IntArray:
        """Each rank's [sizes[r]] small numbers about its rows -> [n] on every rank, in all_gather's order."""
        ...

    def announce(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank; what the others say is left unread."""
        ...

    def close(self) -> None:
        """Let the others see the end. Calling it again does nothing."""
        ...


def equal_sizes(count: int, ranks: int) -> list[int]:
    """`count` in shares that differ by at most one, the larger ones first.

    >>> equal_sizes(7, 3)
    [3, 2, 2]
    """
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]
