"""Connects the ranks of a group that are on several hosts, once those of each host share memory.

Every rank has a Door, a TCP port. Rank 0's is known to the first rank of each other host:

    a first rank -> rank 0    rank, size, and the addresses of the doors of its host
    rank 0 -> a first rank    the addresses of all doors, once all hosts are there
    any rank -> each rank of the hosts before its own    rank, size

Each connection begins with the handshake of authentication.py, and everything after it is encrypted. It stays
and carries the rounds of linked_peers.py.

Question: How do the ranks of a group on several hosts find each other?
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
from collections.abc import Collection, Sequence
from typing import NamedTuple

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.transport import address as addresses
from moesaic.transport.acceptor import Acceptor
from moesaic.transport.authentication import Deadline, Terms, prove_as_client, prove_as_server
from moesaic.transport.host import find_advertised_address
from moesaic.transport.host_watch import watch
from moesaic.transport.linked_peers import LinkedPeers
from moesaic.transport.peers import HALF_BYTES, Peers
from moesaic.transport.sealed_socket import Wire, wire
from moesaic.transport.words import hear, say

HANDSHAKE_SECONDS = 10.0
LINK_SECONDS = 60.0
"""Seconds that the ranks of all hosts have to connect."""
MAX_PENDING = 64
"""Maximum handshakes at the same time. A further peer replaces the oldest one."""


class Place(NamedTuple):
    """Where one rank is. The ranks of a host are consecutive, and there are as many on each."""

    node: int
    """Number of its host. That of rank 0 is 0."""
    nodes: int
    """Number of hosts."""
    local_rank: int
    """Number of the rank among the ranks of its host."""
    ranks_per_host: int
    """Ranks of each host."""

    @property
    def first_rank(self) -> int:
        """The first rank of this host."""
        return self.node * self.ranks_per_host

    @property
    def rank(self) -> int:
        return self.first_rank + self.local_rank

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_host

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_host


class _RemoteRank(NamedTuple):
    """A rank of another host, and what it said."""

    wire: Wire
    rank: int
    size: int
    doors: list[str]


class Door:
    """Where one rank waits for ranks of other hosts."""

    def __init__(self, listen: str, secret: bytes, capacity: int = HALF_BYTES) -> None:
        """listen: tcp:HOST:PORT; port 0 is any free one. capacity: see `link`. Raises ConfigError."""
        self.secret, self.terms = secret, Terms("stream", capacity)
        listening, address = addresses.bind(addresses.parse(listen))
        self.address = str(find_advertised_address(address))
        """The address at which other hosts reach this door."""
        self._remote_ranks: queue.SimpleQueue[_RemoteRank] = queue.SimpleQueue()
        self._acceptor = Acceptor(
            listening, str(address), self._handshake, self._remote_ranks.put, MAX_PENDING
        )

    def next(self, deadline: Deadline) -> _RemoteRank:
        """The next rank that has connected. Raises TimeoutError."""
        try:
            return self._remote_ranks.get(timeout=deadline.left())
        except queue.Empty:
            raise TimeoutError("timed out") from None

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._acceptor.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._remote_ranks.get(block=False).wire.close()

    def _handshake(self, sock: socket.socket) -> _RemoteRank:
        deadline = Deadline(HANDSHAKE_SECONDS)
        terms, keys = prove_as_server(sock, self.secret, deadline)
        if terms != self.terms:
            raise ConnectionLost(f"its rounds have {terms.heap_bytes} bytes, not {self.terms.heap_bytes}")
        deadline.apply(sock)
        return _listen_to(sock, wire(sock, keys))


def link(
    host_peers: Peers, door: Door, place: Place, first_address: str, seconds: float = LINK_SECONDS
) -> LinkedPeers:
    """This rank's end of the whole group. Returns once it is connected to all ranks of other hosts.

    host_peers: the ranks of this host, which all call this. first_address: the address of rank 0's door. The
    capacity of the door is that of the rounds. Door and `host_peers` belong to the result from now on.

    Raises ConnectionLost if not all ranks connect in `seconds`.
    """
    deadline = Deadline(seconds)
    links: dict[int, Wire] = {}
    try:
        doors = _doors(host_peers, door, place, first_address, links, deadline)
        for rank in range(place.first_rank):
            if rank not in links:
                links[rank] = _dial(doors[rank], door, place, [], deadline)
        while len(links) < place.size - place.ranks_per_host:
            _take(door.next(deadline), place, links)
        return LinkedPeers(host_peers, place.first_rank, links, door.terms.heap_bytes)
    except BaseException as error:
        host_peers.close()
        for peer_wire in links.values():
            peer_wire.close()
        if isinstance(error, OSError | ConfigError):
            reason = f"rank {place.rank} of {place.size} did not reach all ranks of other hosts: {error}"
            raise ConnectionLost(reason) from None
        raise
    finally:
        door.close()


def _doors(
    host_peers: Peers,
    door: Door,
    place: Place,
    first_address: str,
    links: dict[int, Wire],
    deadline: Deadline,
) -> list[str]:
    """The addresses of all doors, in the order of the ranks. Adds the connections that are made for that."""
    own_doors = [bytes(part).decode() for part in _exchange_text(host_peers, door.address)]
    all_doors = own_doors
    if place.rank == 0:
        all_doors = _collect_doors(own_doors, door, place, links, deadline)
    elif place.local_rank == 0:
        links[0] = _dial(first_address, door, place, own_doors, deadline)
        all_doors = hear(links[0]).get("doors", [])
    doors: list[str] = json.loads(bytes(_exchange_text(host_peers, json.dumps(all_doors))[0]))
    if len(doors) != place.size:
        raise ConnectionLost(f"rank 0 gave the addresses of {len(doors)} ranks, not of {place.size}")
    return doors


def _collect_doors(
    own_doors: list[str], door: Door, place: Place, links: dict[int, Wire], deadline: Deadline
) -> list[str]:
    """On rank 0: the addresses of all doors, which the other hosts get too."""
    doors_of_hosts = {0: own_doors}
    while len(doors_of_hosts) < place.nodes:
        remote_rank = _take(door.next(deadline), place, links)
        if remote_rank is not None and len(remote_rank.doors) == place.ranks_per_host:
            doors_of_hosts[place.node_of(remote_rank.rank)] = remote_rank.doors
    doors = [address for node in range(place.nodes) for address in doors_of_hosts[node]]
    for peer_wire in links.values():
        say(peer_wire, doors=doors)
    return doors


def _take(remote_rank: _RemoteRank, place: Place, links: dict[int, Wire]) -> _RemoteRank | None:
    """Keep a rank that connected. None for one that does not belong here."""
    if (
        remote_rank.size != place.size
        or remote_rank.rank in links
        or not place.first_rank + place.ranks_per_host <= remote_rank.rank < place.size
    ):
        remote_rank.wire.close()
        return None
    links[remote_rank.rank] = remote_rank.wire
    return remote_rank


def _dial(address: str, door: Door, place: Place, doors: Collection[str], deadline: Deadline) -> Wire:
    """A connection to the door of another rank."""
    sock = addresses.dial(addresses.parse(address), deadline.left())
    try:
        keys = prove_as_client(sock, door.secret, door.terms, deadline)
        watch(sock)
        deadline.apply(sock)
        peer_wire = wire(sock, keys)
        say(peer_wire, rank=place.rank, size=place.size, doors=list(doors))
        return peer_wire
    except BaseException:
        sock.close()
        raise


def _listen_to(sock: socket.socket, peer_wire: Wire) -> _RemoteRank:
    """What a rank that connected says."""
    word = hear(peer_wire)
    try:
        remote_rank = _RemoteRank(
            peer_wire, int(word["rank"]), int(word["size"]), [str(address) for address in word["doors"]]
        )
    except (KeyError, TypeError, ValueError):
        raise ConnectionLost("it did not say which rank it is") from None
    watch(sock)
    return remote_rank


def _exchange_text(host_peers: Peers, text: str) -> Sequence[memoryview]:
    """What each rank of this host says."""
    data = text.encode()
    host_peers.open_for_all(len(data))[:] = data
    return host_peers.exchange()
