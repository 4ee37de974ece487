"""Decides when a row that several servers of another host need crosses the link once, through a relay.

The relay is one of these servers. It gets all rows, and passes them on over links inside of its host. This is
hierarchical all-to-all, as in Tutel and DeepEP. It saves bytes of the slow link and costs two messages inside
of the host, so it pays for calls that are large enough:

    saved bytes / bandwidth between the hosts  >  passed bytes / bandwidth inside + 2 (latency inside + HOP)

Question: Which server of another host gets rows once and passes them on (relays)?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.core.topology import Way

MOST_PARTS = 255
"""Maximum servers that a call reaches through a relay."""
HOP = 200e-6
"""Seconds that a relay needs to receive, copy and send a message. An assumption, not a measurement."""
REST = 1.0
"""Seconds without relays on a host after one of them could not pass on something, or was slow."""


@dataclass(frozen=True)
class Share:
    """What one server would compute of a call."""

    server: int
    pairs: int
    rows: int
    """Distinct rows of these pairs."""


def relay_of(shares: Sequence[Share]) -> int:
    """The server that passes parts on: the one with the most pairs, so that it passes on the fewest.

    Of several such servers it is the one with the lowest id.
    """
    return min(shares, key=lambda share: (-share.pairs, share.server)).server


def saved_bytes(shares: Sequence[Share], rows: int, row_bytes: int, summed: bool) -> int:
    """Bytes that do not cross the link. rows: distinct rows of all shares. summed: the sums are added up.

    Example: one row that three servers need -> two rows. With sums two answers are saved as well.
    """
    directions = 2 if summed else 1
    return directions * row_bytes * (sum(share.rows for share in shares) - rows)


def passed_bytes(shares: Sequence[Share], row_bytes: int, partial: bool) -> int:
    """Bytes of rows and answers that the relay passes on. partial: an answer has one row for each row."""
    relay = relay_of(shares)
    others = [share for share in shares if share.server != relay]
    return row_bytes * sum(share.rows + (share.rows if partial else share.pairs) for share in others)


def pays(
    shares: Sequence[Share],
    rows: int,
    row_bytes: int,
    partial: bool,
    summed: bool,
    way: Way,
    hop: float = HOP,
) -> bool:
    """Whether these shares of a call should go through a relay. way: from the client to this host."""
    saved = saved_bytes(shares, rows, row_bytes, summed) / way.link.bandwidth
    passed = passed_bytes(shares, row_bytes, partial) / way.intra_host_link.bandwidth
    return saved > passed + 2 * (way.intra_host_link.latency + hop)


class Resting:
    """The hosts that are not asked through relays for a while."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def begin(self, host: str, now: float) -> None:
        """A relay of this host could not pass on something, or was slow."""
        self._until[host] = now + REST

    def rests(self, host: str, now: float) -> bool:
        """Whether that was less than `REST` ago."""
        return now < self._until.get(host, now)


def by_host(servers: Sequence[int], ways: Mapping[int, Way]) -> list[list[int]]:
    """The servers of each other host that has several of them, in order of their ids."""
    found: dict[str, list[int]] = {}
    for server in sorted(servers):
        way = ways.get(server)
        if way is not None and not way.on_one_host:
            found.setdefault(way.host, []).append(server)
    return [group for group in found.values() if len(group) > 1]


class Relays:
    """Which servers of other hosts a client asks through one of them."""

    def __init__(self, use: str, row_bytes: int, hop: float = HOP) -> None:
        """use: --relay, so auto, always or off. row_bytes: of a hidden state. hop: as `HOP`."""
        self._use, self._row_bytes, self._hop = use, row_bytes, hop
        self._resting = Resting()

    def groups(
        self, pairs: Mapping[int, IntArray], top_k: int, ways: Mapping[int, Way], partial: bool, now: float
    ) -> list[list[int]]:
        """The groups of servers that are asked through a relay, which is the first of each. Others are asked
        directly.

        pairs: server -> its (row, slot) pairs [p] of a call, as row * top_k + slot.
        partial: answers are sums.
        """
        if self._use == "off" or len(pairs) < 2 or not ways:
            return []
        found = []
        for servers in by_host(list(pairs), ways):
            way = ways[servers[0]]
            if self._resting.rests(way.host, now) or len(servers) > MOST_PARTS:
                continue
            rows = {server: pairs[server] // top_k for server in servers}
            known = [Share(one, len(pairs[one]), len(np.unique(rows[one]))) for one in servers]
            distinct = len(np.unique(np.concatenate(list(rows.values()))))
            saved = saved_bytes(known, distinct, self._row_bytes, partial)
            alike = known, distinct, self._row_bytes, partial, partial, way, self._hop
            if saved and (self._use == "always" or pays(*alike)):
                relay = relay_of(known)
                found.append(sorted(servers, key=lambda server: (server != relay, server)))
        return found

    def rest(self, host: str, now: float) -> None:
        """Ask the servers of this host directly for a while."""
        self._resting.begin(host, now)


class Part(Protocol):
    """The part of a call with parts that one server computes."""

    @property
    def server(self) -> int:
        """The server's id."""
        ...


P = TypeVar("P", bound=Part)
P_co = TypeVar("P_co", bound=Part, covariant=True)


class WithParts(Protocol[P_co]):
    """A call that a relay passes on."""

    @property
    def relay(self) -> int:
        """The id of the relay."""
        ...

    @property
    def is_sum(self) -> bool:
        """Whether the relay adds up the parts' sums."""
        ...

    @property
    def live_parts(self) -> Sequence[P_co]:
        """The parts whose answers are awaited."""
        ...


def needing(relayed: WithParts[P], server: int) -> list[P]:
    """The parts that are of no use, or have to be sent in another way, if this server is lost or slow.

    Example: server 1 passes on parts for servers 2 and 3. If 1 is slow these are the parts of 2 and 3, and if
    2 is slow it is its own part. Of sums it is each part in both cases.
    """
    live = list(relayed.live_parts)
    if relayed.is_sum:
        return live if server in [relayed.relay, *(part.server for part in live)] else []
    if relayed.relay == server:
        return [part for part in live if part.server != server]
    return [part for part in live if part.server == server]


def waited_for(calls: Iterable[WithParts[Part]]) -> set[int]:
    """The servers whose parts would be taken back if they were slow."""
    return {
        server
        for relayed in calls
        for part in relayed.live_parts
        for server in (relayed.relay, part.server)
        if relayed.is_sum or part.server != relayed.relay
    }
