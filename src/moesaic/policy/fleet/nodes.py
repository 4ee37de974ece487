"""Chooses among the nodes of a cluster whose scheduler decides which of them has room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

Resources = Mapping[str, float]
"""Amounts of what processes need and nodes have, such as {"CPU": 4.0}."""


def choose_nodes(
    nodes: Sequence[str],
    similar_nodes: Iterable[str],
    partner_node: str | None = None,
    lost_nodes: Collection[str] = (),
) -> frozenset[str]:
    """The nodes on which a process should start, if they have room.

    nodes: those that exist. similar_nodes: the node of each process that may hold the same experts, or
    serves the same requests: a node that ends should end few of them. partner_node: the node of the process
    that should share memory with this one. lost_nodes: nodes that seem to have ended.

    >>> sorted(choose_nodes(["a", "b", "c"], similar_nodes=["a", "a", "b"]))
    ['c']
    >>> sorted(choose_nodes(["a", "b", "c"], similar_nodes=["a", "a", "b", "c"]))
    ['b', 'c']
    >>> sorted(choose_nodes(["a", "b", "c"], similar_nodes=["a", "a", "b"], partner_node="a"))
    ['a']
    """
    live_nodes = [node for node in nodes if node not in lost_nodes]
    if partner_node in live_nodes:
        return frozenset((partner_node,))
    uses = Counter(similar_nodes)
    fewest = min((uses[node] for node in live_nodes), default=0)
    return frozenset(node for node in live_nodes if uses[node] == fewest)


def threads_that_fit(cpus: Iterable[float], processes: int) -> int:
    """The largest number of threads with which so many processes fit on nodes with `cpus` cores each.

    At least 1, even if the processes do not fit with 1. A process cannot be split over nodes:

    >>> threads_that_fit([16, 16, 16], processes=4)
    8
    """
    cores = [int(count) for count in cpus]
    fits = (
        threads
        for threads in range(max(cores, default=1), 0, -1)
        if sum(count // threads for count in cores) >= processes
    )
    return next(fits, 1)


def has_room(resources: Resources, needs: Resources) -> bool:
    """Whether a node with all of its `resources` free has room for what is needed."""
    return all(resources.get(name, 0.0) >= amount for name, amount in needs.items())


def no_room(needs: Resources, free: Resources, nodes: Sequence[Resources]) -> str:
    """Why a process has no node, in words for people. free: of all nodes together. nodes: what each has.

    >>> no_room({"CPU": 2.0}, {"CPU": 1.0}, [{"CPU": 4.0}, {"CPU": 1.0}])
    'no node has 2 CPU free; 2 nodes have 1 of 5 CPU free'
    """
    need = " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
    have = ", ".join(f"{free.get(name, 0.0):g} of {total[name]:g} {name}" for name in needs)
    return f"no node has {need} free; {len(nodes)} nodes have {have} free"
