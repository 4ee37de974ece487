"""Collectives in which every rank sends to every other: one round each, two rounds for an all-reduce.

They move the same bytes as a ring and wait once instead of ranks - 1 times. On one host with few ranks and
few rows the number of waits decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Traffic, equal_sizes
from moesaic.experts.collectives.packets import (
    FloatArray,
    Outgoing,
    Packet,
    local_packet,
    metadata_bytes,
    packet_bytes,
    read_packet,
    write_packet,
)
from moesaic.transport.peers import Peers, local_peers

FLOAT = 4
"""Bytes of a float32 number."""


class OneShotGroup:
    """A Group over any Peers, which it owns."""

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._peers, self._counted_bytes = peers, 0
        self._traffic: dict[str, int] = {}

    @property
    def traffic(self) -> Traffic:
        return Traffic(**self._traffic)

    def all_reduce(self, rows: FloatArray) -> FloatArray:
        flat = rows.reshape(-1)
        # Numbers are split, not rows, so that the parts are equal even with fewer rows than ranks.
        starts = _starts(equal_sizes(flat.size, self.size))
        for rank, view in self._open([stop - start for start, stop in _spans(starts)]):
            view[:] = flat[starts[rank] : starts[rank + 1]]
        partial_sum = self._sum(flat[starts[self.rank] : starts[self.rank + 1]])
        _floats(self._peers.open_for_all(partial_sum.nbytes))[:] = partial_sum
        result = np.empty(flat.size, np.float32)
        for (start, stop), part in zip(_spans(starts), self._exchange(), strict=True):
            result[start:stop] = self._fitting(part, stop - start)
        self._count("all_reduce")
        return result.reshape(rows.shape)

    def reduce_scatter(
        self, rows: FloatArray, sizes: Iterable[int] | None = None, order: IntArray | None = None
    ) -> FloatArray:
        count, width = rows.shape
        starts = _starts(equal_sizes(count, self.size) if sizes is None else sizes)
        for rank, view in self._open([(stop - start) * width for start, stop in _spans(starts)]):
            _copy_rows(rows, order, starts[rank], starts[rank + 1], view)
        shard = np.empty((starts[self.rank + 1] - starts[self.rank]) * width, np.float32)
        _copy_rows(rows, order, starts[self.rank], starts[self.rank + 1], shard)
        shard = self._sum(shard)
        self._count("reduce_scatter")
        return shard.reshape(-1, width)

    def all_gather(self, rows: FloatArray, order: IntArray | None = None) -> FloatArray:
        width = rows.shape[1]
        _floats(self._peers.open_for_all(rows.nbytes)).reshape(rows.shape)[...] = rows
        parts = [self._rows(part, width) for part in self._exchange()]
        gathered = np.empty((sum(map(len, parts)), width), np.float32)
        if order is not None and len(order) != len(gathered):
            raise self._close_with_error(
                f"the ranks sent {len(gathered)} rows where {len(order)} were expected"
            )
        for (start, stop), part in zip(_spans(_starts(list(map(len, parts)))), parts, strict=True):
            gathered[slice(start, stop) if order is None else order[start:stop]] = part
        self._count("all_gather")
        return gathered

    def all_to_all_v(self, outgoing: Sequence[Outgoing]) -> list[Packet]:
        other_ranks = [rank for rank in range(self.size) if rank != self.rank]
        sizes = [0 if rank == self.rank else packet_bytes(packet) for rank, packet in enumerate(outgoing)]
        views = self._peers.open(sizes)
        for rank in other_ranks:
            write_packet(outgoing[rank], views[rank])
        messages = self._exchange()
        try:
            packets = [
                read_packet(part) if rank in other_ranks else local_packet(outgoing[rank])
                for rank, part in enumerate(messages)
            ]
        # The other ranks wait for this one until it leaves the group.
        except ConnectionLost:
            self.close()
            raise
        self._count("all_to_all", sum(metadata_bytes(*outgoing[rank].experts.shape) for rank in other_ranks))
        return packets

    def answer(self, parts: Sequence[FloatArray], counts: Sequence[int]) -> list[FloatArray]:
        width = parts[self.rank].shape[1]
        for rank, view in self._open([part.size for part in parts]):
            view.reshape(-1, width)[...] = parts[rank]
        answers = []
        for rank, part in enumerate(self._exchange()):
            numbers = counts[rank] * width
            is_own_rank = rank == self.rank
            answers.append(parts[rank] if is_own_rank else self._fitting(part, numbers).reshape(-1, width))
        self._count("all_to_all")
        return answers

    def gather_notes(self, notes: IntArray, order: IntArray) -> IntArray:
        view = self._peers.open_for_all(FLOAT * len(notes))
        np.frombuffer(view, np.int32)[:] = notes
        gathered = np.empty(len(order), np.int64)
        start = 0
        for part in self._exchange():
            stop = start + len(part) // FLOAT
            if len(part) % FLOAT or stop > len(order):
                raise self._close_with_error(
                    f"a rank sent {len(part)} bytes, which are no notes of {len(order)} rows"
                )
            gathered[order[start:stop]] = np.frombuffer(part, np.int32)
            start = stop
        self._count("metadata")
        return gathered

    def announce(self, message: bytes) -> bytes:
        payload = message if self.rank == 0 else b""
        self._peers.open_for_all(len(payload))[:] = payload
        announced_message = bytes(self._exchange()[0])
        self._count("messages")
        return announced_message

    def close(self) -> None:
        self._peers.close()

    def _open(self, counts: Sequence[int]) -> list[tuple[int, FloatArray]]:
        """Begins a round. Returns memory for this many numbers to each other rank."""
        sizes = [0 if rank == self.rank else FLOAT * count for rank, count in enumerate(counts)]
        views = self._peers.open(sizes)
        return [(rank, _floats(view)) for rank, view in enumerate(views) if rank != self.rank]

    def _exchange(self) -> list[memoryview]:
        return self._peers.exchange()

    def _sum(self, addend: FloatArray) -> FloatArray:
        """Ends the round. Returns the sum of all ranks' addends, in the order of the ranks."""
        total = np.empty_like(addend)
        for rank, message in enumerate(self._exchange()):
            part = addend if rank == self.rank else self._fitting(message, addend.size)
            if rank == 0:
                total[:] = part
            else:
                total += part
        return total

    def _fitting(self, part: memoryview, count: int) -> FloatArray:
        """Returns `part` as `count` numbers. Raises ConnectionLost if it has another size."""
        if len(part) != FLOAT * count:
            raise self._close_with_error(f"a rank sent {len(part)} bytes where {FLOAT * count} were expected")
        return _floats(part)

    def _rows(self, part: memoryview, width: int) -> FloatArray:
        """Returns `part` as rows. Raises ConnectionLost if its size does not fit."""
        if len(part) % (FLOAT * width):
            raise self._close_with_error(
                f"a rank sent {len(part)} bytes, which are no rows of {width} numbers"
            )
        return _floats(part).reshape(-1, width)

    def _close_with_error(self, reason: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(reason)

    def _count(self, kind: str, metadata: int = 0) -> None:
        """Counts the bytes that the transport has sent since the last count as this kind."""
        payload = self._peers.sent_bytes - self._counted_bytes - metadata
        self._counted_bytes = self._peers.sent_bytes
        for name, count in ((kind, payload), ("metadata", metadata)):
            self._traffic[name] = self._traffic.get(name, 0) + count


def local_group(size: int) -> list[OneShotGroup]:
    """Returns the ranks of a group whose ranks are threads of this process."""
    return [OneShotGroup(peers) for peers in local_peers(size)]


def _floats(memory: memoryview) -> FloatArray:
    return np.frombuffer(memory, np.float32)


def _starts(sizes: Iterable[int]) -> list[int]:
    """Returns [ranks + 1] where each rank's part begins."""
    return [0, *itertools.accumulate(map(int, sizes))]


def _spans(starts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts))


def _copy_rows(rows: FloatArray, order: IntArray | None, start: int, stop: int, target: FloatArray) -> None:
    """Copies rows start to stop of rows[order] to `target`."""
    target_rows = target.reshape(-1, rows.shape[1])
    if order is None:
        target_rows[...] = rows[start:stop]
    else:
        # With mode="raise" numpy would fill a buffer first. The indices are known to be in range.
        np.take(rows, order[start:stop], axis=0, out=target_rows, mode="clip")
