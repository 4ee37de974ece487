"""Links of one_sided_calls.py within this process: what NIXL does between hosts, for tests without NIXL."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Sequence
from typing import cast

from moesaic.transport.nixl_link import NixlLink
from moesaic.transport.one_sided_calls import OneSidedAnswerer, OneSidedCaller


class FakeLink:
    """One of two links. A write arrives when its sender has called `pump` a few times, so after its frame."""

    PUMPS = 3

    def __init__(self, area_bytes: int) -> None:
        self.area = memoryview(mmap.mmap(-1, area_bytes))
        self.failure: str | None = None
        self.peer: FakeLink
        self._writes: list[tuple[int, Sequence[tuple[int, int]], int]] = []
        """(number, pieces, pumps that are left) of writes under way."""
        self._arrived: set[int] = set()

    @property
    def writing(self) -> int:
        return len(self._writes)

    def write(self, number: int, pieces: Sequence[tuple[int, int]]) -> None:
        if self.failure is None:
            self._writes.append((number, pieces, self.PUMPS))

    def settle(self, number: int) -> None:
        """It ends later."""

    def pump(self) -> bool:
        left = [(number, pieces, pumps - 1) for number, pieces, pumps in self._writes]
        self._writes = [one for one in left if one[2]]
        for number, pieces, pumps in left:
            if not pumps:
                self._land(number, pieces)
        return len(self._writes) < len(left)

    def take(self, number: int) -> bool:
        found = number in self._arrived
        self._arrived.discard(number)
        return found

    def close(self) -> None:
        for number, pieces, _ in self._writes:
            self._land(number, pieces)
        self._writes, self.failure = [], "this end is closed"

    def _land(self, number: int, pieces: Sequence[tuple[int, int]]) -> None:
        for begin, end in pieces:
            self.peer.area[begin:end] = self.area[begin:end]
        self.peer._arrived.add(number)


def one_sided_pair(heap_bytes: int) -> tuple[OneSidedCaller, OneSidedAnswerer]:
    """Both ends of a connection."""
    links = FakeLink(heap_bytes), FakeLink(heap_bytes)
    links[0].peer, links[1].peer = links[1], links[0]
    one, two = socket.socketpair()
    return OneSidedCaller(one, cast(NixlLink, links[0])), OneSidedAnswerer(two, cast(NixlLink, links[1]))
