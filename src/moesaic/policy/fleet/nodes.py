"""Chooses among the nodes of a cluster whose scheduler decides which of them has room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

Resources = Mapping[str, float]
"""Amounts of what processes need and nodes have, such as {"CPU": 4.0}."""


def preferred(
    nodes: Sequence[str], alike: Iterable[str], beside: str | None = None, lost: Collection[str] = ()
) -> frozenset[str]:
    """The nodes on which a process should start, if they have room.

    nodes: those that exist. alike: the node of each process that may hold the same experts, or serves the
    same requests: a node that ends should end few of them. beside: the node of the process that should share
    memory with this one. lost: nodes that seem to have ended.

    >>> sorted(preferred(["a", "b", "c"], alike=["a", "a", "b"]))
    ['c']
    >>> sorted(preferred(["a", "b", "c"], alike=["a", "a", "b", "c"]))
    ['b', 'c']
    >>> sorted(preferred(["a", "b", "c"], alike=["a", "a", "b"], beside="a"))
    ['a']
    """
    there = [node for node in nodes if node not in lost]
    if beside in there:
        return frozenset((beside,))
    uses = Counter(alike)
    fewest = min((uses[node] for node in there), default=0)
    return frozenset(node for node in there if uses[node] == fewest)


def threads_that_fit(cpus: Iterable[float], processes: int) -> int:
    """The largest number of threads with which so many processes fit on nodes with `cpus` cores each.

    At least 1, even if the processes do not fit with 1. A process cannot be split over nodes:

    >>> threads_that_fit([16, 16, 16], processes=4)
    8
    """
    whole = [int(count) for count in cpus]
    fits = (
        threads
        for threads in range(max(whole, default=1), 0, -1)
        if sum(count // threads for count in whole) >= processes
    )
    return next(fits, 1)


def has(resources: Resources, needed: Resources) -> bool:
    """Whether a node with all of its `resources` free has room for what is needed."""
    return all(resources.get(name, 0.0) >= amount for name, amount in needed.items())


def no_room(needed: Resources, free: Resources, nodes: Sequence[Resources]) -> str:
    """Why a process has no node, in words for people. free: of all nodes together. nodes: what each has.

    >>> no_room({"CPU": 2.0}, {"CPU": 1.0}, [{"CPU": 4.0}, {"CPU": 1.0}])
    'no node has 2 CPU free; 2 nodes have 1 of 5 CPU free'
    """
    need = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in needed}
    have = ", ".join(f"{free.get(name, 0.0):g} of {total[name]:g} {name}" for name in needed)
    return f"no node has {need} free; {len(nodes)} nodes have {have} free"
