"""Rounds among the processes of several hosts: by other Peers inside of a host, by streams between hosts.

Each rank has a connection to each rank of another host, which carries its parts of the rounds in order:

    8 bytes: n, little-endian, then the n bytes of the part

A rank that has ended a round has the parts of all others. So the others can be one round ahead of it at most,
and two buffers for each connection are enough. A part that goes to every rank crosses the link once for each
rank of the other host.
"""

from __future__ import annotations

import itertools
import select
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moesaic.core.errors import ConnectionLost
from moesaic.transport.frames import Frames
from moesaic.transport.peers import HALF_BYTES, Peers, refuse
from moesaic.transport.sealed_socket import Wire

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
"""Parts begin at multiples of so many bytes."""
_AHEAD = 2
"""Parts of one rank that can have arrived: that of the round under way, and of the next one."""


class _Link:
    """The connection to one rank of another host."""

    def __init__(self, rank: int, wire: Wire, capacity: int) -> None:
        self.rank = rank
        self._capacity = capacity
        self._parts: deque[memoryview] = deque()
        """What has arrived and belongs to no round that has ended."""
        self._frames = Frames(wire, self._read_parts())

    def fileno(self) -> int:
        return self._frames.fileno()

    @property
    def events(self) -> int:
        return self._frames.events

    def send(self, part: memoryview) -> None:
        """Begin to send the part of a round. It must not change until `done`."""
        self._frames.push([memoryview(_LENGTH.pack(len(part))), part])

    def advance(self) -> bool:
        """Go on with the round. Returns whether both parts have arrived. Raises ConnectionLost if they never
        will.

        What the rank sent before it died counts.
        """
        self._frames.pump()
        while self._frames.has_more_bytes:
            self._frames.pump()
        if self._frames.receive_error is not None and not self._parts:
            raise ConnectionLost(f"rank {self.rank} of the group is gone: {self._frames.receive_error}")
        return bool(self._parts) and not self._frames.unsent_bytes

    def take(self) -> memoryview:
        """The part of the round, which is done."""
        return self._parts.popleft()

    def close(self) -> None:
        self._frames.close()

    def _read_parts(self) -> Iterator[list[memoryview]]:
        """Read parts, by turns into each of the buffers. Their memory is allocated when it is written."""
        header = memoryview(bytearray(_LENGTH.size))
        for buffer in itertools.cycle([np.empty(self._capacity, np.uint8).data for _ in range(_AHEAD)]):
            yield [header]
            (count,) = _LENGTH.unpack(header)
            if count > self._capacity or len(self._parts) == _AHEAD:
                raise ConnectionLost(f"it sent a part of {count} bytes out of turn, or one that is too large")
            yield [buffer[:count]]
            self._parts.append(buffer[:count].toreadonly())


class LinkedPeers:
    """A Peers of ranks on several hosts, with as many consecutive ranks on each.

    host_peers: the ranks of this host. first_rank: the rank of the group that is rank 0 there.
    links: rank -> the connection to it, for all ranks of other hosts. Each needs a thread or a watch that
    ends it if the other host vanishes.
    Both belong to this object from now on. capacity: maximum bytes that a rank sends in a round.
    """

    def __init__(
        self, host_peers: Peers, first_rank: int, links: Mapping[int, Wire], capacity: int = HALF_BYTES
    ) -> None:
        self.rank, self.size = first_rank + host_peers.rank, host_peers.size + len(links)
        self._host_peers, self._first_rank, self._capacity = host_peers, first_rank, capacity
        self._links = [_Link(rank, links[rank], capacity) for rank in sorted(links)]
        self._memory = np.empty(capacity + _ALIGNMENT * len(links), np.uint8).data
        """Memory for the parts that go to other hosts."""
        self._round_parts: list[memoryview] = []
        """The part for each of the links."""
        self._sent_bytes, self._loss_reason = (
            -host_peers.sent_bytes,
            "",
        )  # what the ranks said before the first round does not count

    @property
    def sent_bytes(self) -> int:
        return self._host_peers.sent_bytes + self._sent_bytes

    def open(self, sizes: Sequence[int]) -> list[memoryview]:
        self._check(sum(sizes))
        end = self._first_rank + self._host_peers.size
        views = self._host_peers.open(sizes[self._first_rank : end])
        self._round_parts, begin = [], 0
        for link in self._links:
            self._round_parts.append(self._memory[begin : begin + sizes[link.rank]])
            begin += -(-sizes[link.rank] // _ALIGNMENT) * _ALIGNMENT
        return self._merge_in_order(self._round_parts, views)

    def open_for_all(self, count: int) -> memoryview:
        self._check(count)
        view = self._host_peers.open_for_all(count)
        self._round_parts = [view] * len(self._links)
        return view

    def exchange(self) -> list[memoryview]:
        self._check(0)
        try:
            for link, part in zip(self._links, self._round_parts, strict=True):
                link.send(part)
            views = self._host_peers.exchange()
            while waiting := [link for link in self._links if not link.advance()]:
                _sleep(waiting)
        except ConnectionLost as lost:
            raise ConnectionLost(self._end(str(lost))) from None
        except BaseException:  # an interrupted round ends the group for all ranks
            self._end("a round was interrupted")
            raise
        self._sent_bytes += sum(map(len, self._round_parts))
        return self._merge_in_order([link.take() for link in self._links], views)

    def close(self) -> None:
        self._loss_reason = self._loss_reason or "this end of the group is closed"
        self._host_peers.close()
        for link in self._links:
            link.close()

    def _merge_in_order(
        self, link_views: Sequence[memoryview], host_views: Sequence[memoryview]
    ) -> list[memoryview]:
        """The views of all ranks in order. The links are in order, with a gap at the ranks of this host."""
        return [*link_views[: self._first_rank], *host_views, *link_views[self._first_rank :]]

    def _end(self, reason: str) -> str:
        """End the group for this reason, or keep the first one. Returns the reason."""
        self._loss_reason = self._loss_reason or reason
        self.close()
        return self._loss_reason

    def _check(self, total: int) -> None:
        if self._loss_reason:
            raise ConnectionLost(self._loss_reason)
        if total > self._capacity:
            raise refuse(total, self._capacity)


def _sleep(links: Sequence[_Link]) -> None:
    """Sleep until one of the links has something to read, or room for what is unsent."""
    poller = select.poll()
    for link in links:
        poller.register(link.fileno(), link.events)
    poller.poll()
