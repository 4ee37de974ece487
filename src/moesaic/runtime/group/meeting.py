"""Where the ranks of a group meet: those of one host in shared memory, and all of them over TCP.

Each host has as many consecutive ranks. The first rank of a host starts its other ranks and tells them their
place. Rank 0 tells the supervisor where it listens, and the supervisor tells the other hosts.

Question: How do the ranks of a group on several hosts find each other?
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from moesaic.core.messages import RanksMeet
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.transport import address as addresses
from moesaic.transport.gathering import gather
from moesaic.transport.linking import Door, Place, link
from moesaic.transport.peers import Peers

READY_SECONDS = 120.0
"""Seconds for the processes of a group to start and find each other. Weights are read later."""


@dataclass(frozen=True)
class RankPlace:
    """Where one rank meets the others. It is told on the rank's standard input, since it has the secret."""

    socket: str
    """Unix socket of the first rank of this host."""
    secret: str
    """The secret of the group, in hex."""
    local_rank: int
    """Number of the rank among those of its host."""
    ranks_per_host: int
    """Ranks of each host."""
    node: int = 0
    """Number of the host."""
    nodes: int = 1
    """Number of hosts."""
    listen: str = ""
    """tcp:HOST:PORT at which this host listens for ranks of other hosts. Empty: there are none."""
    first_address: str = ""
    """tcp:HOST:PORT at which rank 0 listens. Empty on its own host."""

    def to_line(self) -> str:
        """The place as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> RankPlace:
        """The inverse of `to_line`."""
        return cls(**json.loads(line))


def meet(place: RankPlace, announce: Callable[[RanksMeet], None]) -> Group:
    """This rank's end of the group. Returns once all ranks are there.

    announce: called on rank 0 of a group over several hosts, with where the ranks of the others connect.

    Raises ConnectionLost if a rank is missing, and ConfigError for an address at which it cannot listen.
    """
    return OneShotGroup(_gather_local_ranks(place) if place.nodes == 1 else _over_hosts(place, announce))


def _gather_local_ranks(place: RankPlace) -> Peers:
    secret = bytes.fromhex(place.secret)
    return gather(place.socket, secret, place.local_rank, place.ranks_per_host, seconds=READY_SECONDS)


def _over_hosts(place: RankPlace, announce: Callable[[RanksMeet], None]) -> Peers:
    place_of_rank, listen = (
        Place(place.node, place.nodes, place.local_rank, place.ranks_per_host),
        addresses.parse(place.listen),
    )
    # The ranks of a host share its address, so each listens at a port of its own.
    if listen.port:
        listen = listen._replace(port=listen.port + place.local_rank)
    door = Door(str(listen), bytes.fromhex(place.secret))
    try:
        if place_of_rank.rank == 0:
            announce(RanksMeet(door.address, door.secret))
        local_peers = _gather_local_ranks(place)
    except BaseException:
        door.close()
        raise
    return link(local_peers, door, place_of_rank, place.first_address, READY_SECONDS)
