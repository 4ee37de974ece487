"""Decides when a row that several servers of another host need crosses the link once, through a relay.

The relay is one of these servers. It gets all rows, and passes them on over links inside of its host. This is
hierarchical all-to-all, as in Tutel and DeepEP. It saves bytes of the slow link and costs two messages inside
of the host, so it pays for calls that are large enough:

    saved bytes / bandwidth between the hosts  >  passed bytes / bandwidth inside + 2 (latency inside + HOP)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic.core.topology import Way

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


def pays(shares: Sequence[Share], rows: int, row_bytes: int, partial: bool, summed: bool, way: Way) -> bool:
    """Whether these shares of a call should go through a relay. way: from the client to this host."""
    saved = saved_bytes(shares, rows, row_bytes, summed) / way.link.bandwidth
    passed = passed_bytes(shares, row_bytes, partial) / way.inside.bandwidth
    return saved > passed + 2 * (way.inside.latency + HOP)


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
        if way is not None and not way.near:
            found.setdefault(way.host, []).append(server)
    return [group for group in found.values() if len(group) > 1]
