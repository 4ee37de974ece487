"""Groups over several hosts whose ranks are all in this process, connected by TCP."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moesaic.transport.linked_peers import LinkedPeers
from moesaic.transport.linking import Door, Place, link
from moesaic.transport.peers import Peers, local_peers

SECRET = b"a secret of the tests"
PATIENCE = 60.0

Near = Callable[[int], list[Peers]]
"""Makes the ranks of one host."""


def linked(
    nodes: int, each: int, capacity: int, near: Near | None = None, seconds: float = PATIENCE
) -> list[LinkedPeers]:
    """`nodes` hosts with `each` ranks. near: None: the ranks of a host are threads."""
    made: list[Peers] = []
    for _ in range(nodes):
        made += local_peers(each, capacity) if near is None else near(each)
    doors = [Door("tcp:127.0.0.1:0", SECRET, capacity) for _ in made]
    places = [Place(node, nodes, number, each) for node in range(nodes) for number in range(each)]
    with ThreadPoolExecutor(len(made)) as pool:
        calls = [
            pool.submit(link, end, door, place, doors[0].address, seconds)
            for end, door, place in reversed(list(zip(made, doors, places, strict=True)))
        ]
        return [call.result() for call in reversed(calls)]
