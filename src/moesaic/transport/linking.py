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
from moesaic.transport.host import advertised
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
    near: int
    """Its number among the ranks of its host."""
    each: int
    """Ranks of each host."""

    @property
    def first(self) -> int:
        """The first rank of this host."""
        return self.node * self.each

    @property
    def rank(self) -> int:
        return self.first + self.near

    @property
    def size(self) -> int:
        return self.nodes * self.each

    def node_of(self, rank: int) -> int:
        return rank // self.each


class _Met(NamedTuple):
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
        listening, where = addresses.bind(addresses.parse(listen))
        self.address = str(advertised(where))
        """For other hosts."""
        self._met: queue.SimpleQueue[_Met] = queue.SimpleQueue()
        self._acceptor = Acceptor(listening, str(where), self._handshake, self._met.put, MAX_PENDING)

    def next(self, deadline: Deadline) -> _Met:
        """The next rank that has connected. Raises TimeoutError."""
        try:
            return self._met.get(timeout=deadline.left())
        except queue.Empty:
            raise TimeoutError("timed out") from None

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._acceptor.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._met.get(block=False).wire.close()

    def _handshake(self, sock: socket.socket) -> _Met:
        deadline = Deadline(HANDSHAKE_SECONDS)
        terms, keys = prove_as_server(sock, self.secret, deadline)
        if terms != self.terms:
            raise ConnectionLost(f"its rounds have {terms.heap_bytes} bytes, not {self.terms.heap_bytes}")
        deadline.apply(sock)
        return _listen_to(sock, wire(sock, keys))


def link(near: Peers, door: Door, place: Place, first: str, seconds: float = LINK_SECONDS) -> LinkedPeers:
    """This rank's end of the whole group. Returns once it is connected to all ranks of other hosts.

    near: the ranks of this host, which all call this. first: the address of rank 0's door. The capacity of
    the door is that of the rounds. Door and `near` belong to the result from now on.

    Raises ConnectionLost if not all ranks connect in `seconds`.
    """
    deadline = Deadline(seconds)
    links: dict[int, Wire] = {}
    try:
        doors = _doors(near, door, place, first, links, deadline)
        for rank in range(place.first):
            if rank not in links:
                links[rank] = _dial(doors[rank], door, place, [], deadline)
        while len(links) < place.size - place.each:
            _take(door.next(deadline), place, links)
        return LinkedPeers(near, place.first, links, door.terms.heap_bytes)
    except BaseException as error:
        near.close()
        for each in links.values():
            each.close()
        if isinstance(error, OSError | ConfigError):
            how = f"rank {place.rank} of {place.size} did not reach all ranks of other hosts: {error}"
            raise ConnectionLost(how) from None
        raise
    finally:
        door.close()


def _doors(
    near: Peers, door: Door, place: Place, first: str, links: dict[int, Wire], deadline: Deadline
) -> list[str]:
    """The addresses of all doors, in the order of the ranks. Adds the connections that are made for that."""
    here = [bytes(part).decode() for part in _told(near, door.address)]
    every = here
    if place.rank == 0:
        every = _collected(here, door, place, links, deadline)
    elif place.near == 0:
        links[0] = _dial(first, door, place, here, deadline)
        every = hear(links[0]).get("doors", [])
    found: list[str] = json.loads(bytes(_told(near, json.dumps(every))[0]))
    if len(found) != place.size:
        raise ConnectionLost(f"rank 0 gave the addresses of {len(found)} ranks, not of {place.size}")
    return found


def _collected(
    here: list[str], door: Door, place: Place, links: dict[int, Wire], deadline: Deadline
) -> list[str]:
    """On rank 0: the addresses of all doors, which the other hosts get too."""
    every = {0: here}
    while len(every) < place.nodes:
        met = _take(door.next(deadline), place, links)
        if met is not None and len(met.doors) == place.each:
            every[place.node_of(met.rank)] = met.doors
    doors = [one for node in range(place.nodes) for one in every[node]]
    for each in links.values():
        say(each, doors=doors)
    return doors


def _take(met: _Met, place: Place, links: dict[int, Wire]) -> _Met | None:
    """Keep a rank that connected. None for one that does not belong here."""
    if met.size != place.size or met.rank in links or not place.first + place.each <= met.rank < place.size:
        met.wire.close()
        return None
    links[met.rank] = met.wire
    return met


def _dial(address: str, door: Door, place: Place, doors: Collection[str], deadline: Deadline) -> Wire:
    """A connection to the door of another rank."""
    sock = addresses.dial(addresses.parse(address), deadline.left())
    try:
        keys = prove_as_client(sock, door.secret, door.terms, deadline)
        watch(sock)
        deadline.apply(sock)
        found = wire(sock, keys)
        say(found, rank=place.rank, size=place.size, doors=list(doors))
        return found
    except BaseException:
        sock.close()
        raise


def _listen_to(sock: socket.socket, found: Wire) -> _Met:
    """What a rank that connected says."""
    word = hear(found)
    try:
        met = _Met(found, int(word["rank"]), int(word["size"]), [str(one) for one in word["doors"]])
    except (KeyError, TypeError, ValueError):
        raise ConnectionLost("it did not say which rank it is") from None
    watch(sock)
    return met


def _told(near: Peers, text: str) -> Sequence[memoryview]:
    """What each rank of this host says."""
    data = text.encode()
    near.open_for_all(len(data))[:] = data
    return near.exchange()
