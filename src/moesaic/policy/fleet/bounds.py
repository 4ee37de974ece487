"""States how many processes a cluster may have: by flags of `serve`, scaling calls and --autoscale.

A number is out of bounds if the processes that it adds could do nothing, or if this host could not hold them:

- More expert servers than a layer has copies of experts. Some would hold no expert of it.
- More processes than memory holds, by the least memory of a process of each role.
- More processes than this one may have open files for.
- More expert servers than TCP ports, where servers listen on these.

Numbers that are not larger than now are never out of bounds: nobody is kept from removing processes.

Question: How many processes may a cluster have at most?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SERVERS = "expert_servers"
ROLES = (SERVERS, "attention_workers", "prefill_workers")
"""The numbers of processes that are bounded, as settings name them."""
LEAST_BYTES = {SERVERS: 16 << 20, "attention_workers": 96 << 20, "prefill_workers": 96 << 20}
"""Bytes of memory that a process takes at least, without any weights. A worker imports torch."""
FIRST_PROCESS_FILES = 48
"""Open files that a process needs that starts one worker, with some to spare."""
MORE_PROCESS_FILES = 4
"""Open files that each further process needs."""
MIB = 1 << 20

Counts = Mapping[str, int]
"""Role, as `ROLES` names it, -> number of its processes."""


@dataclass(frozen=True)
class Room:
    """What the processes of a cluster share. None: it is unknown or does not matter, so it bounds nothing."""

    expert_copies: int | None = None
    """Copies of experts that a layer has."""
    memory: int | None = None
    """Bytes that further processes may take."""
    process_bytes: Counts = field(default_factory=lambda: LEAST_BYTES)
    """Role -> bytes that a process of it takes."""
    files: int | None = None
    """Files that the process may open that starts the others."""
    ports: int | None = None
    """TCP ports on which expert servers can listen."""
    processes_of_unit: Counts = field(default_factory=dict)
    """Role -> processes that count as one, such as the ranks of a worker. A role without an entry has 1."""


@dataclass(frozen=True)
class Bound:
    """The largest number of processes of a role."""

    maximum: int
    reason: str
    """What bounds the number, in words for people."""

    def describe(self) -> str:
        """The allowed values, in words for people.

        >>> Bound(24, "a layer has 24 copies of experts").describe()
        'at most 24: a layer has 24 copies of experts'
        """
        return f"at most {self.maximum}: {self.reason}"


@dataclass(frozen=True)
class Excess:
    """A number that is out of bounds."""

    role: str
    count: int
    bound: Bound


def find_excess(counts: Counts, now: Counts, room: Room) -> Excess | None:
    """The number that is out of bounds, if the numbers change from `now` to `counts`. None: all are allowed.

    If several are, it is the one that adds most processes.

    >>> excess = find_excess({"expert_servers": 1000}, {"expert_servers": 2}, Room(expert_copies=24))
    >>> excess.role, excess.count, excess.bound.maximum
    ('expert_servers', 1000, 24)
    """
    grown_roles = [role for role in ROLES if counts.get(role, 0) > now.get(role, 0)]
    for role in sorted(grown_roles, key=lambda role: now.get(role, 0) - counts[role]):
        bound = find_bound(role, counts, now, room)
        if bound is not None and counts[role] > bound.maximum:
            return Excess(role, counts[role], bound)
    return None


def find_bound(role: str, counts: Counts, now: Counts, room: Room) -> Bound | None:
    """The bound of one role while the others change from `now` to `counts`. None: there is none.

    It is never less than the number now.
    """
    present, bounds = now.get(role, 0), list[Bound]()
    other_counts = {name: max(counts.get(name, 0), now.get(name, 0)) for name in ROLES if name != role}
    unit = room.processes_of_unit
    if role == SERVERS and room.expert_copies is not None:
        bounds.append(Bound(room.expert_copies, f"a layer has {room.expert_copies} copies of experts"))
    if role == SERVERS and room.ports is not None:
        bounds.append(Bound(room.ports, f"this host has {room.ports} ports on which they could listen"))
    if room.memory is not None:
        size = room.process_bytes[role] * unit.get(role, 1)
        other_bytes = sum(
            (count - now.get(name, 0)) * room.process_bytes[name] * unit.get(name, 1)
            for name, count in other_counts.items()
        )
        maximum = present + max(0, room.memory - other_bytes) // size
        text = f"each takes {size // MIB} MiB, and this host has {max(0, room.memory) // MIB} MiB left"
        bounds.append(Bound(maximum, text))
    if room.files is not None:
        processes = 1 + (room.files - FIRST_PROCESS_FILES) // MORE_PROCESS_FILES
        other_processes = sum(count * unit.get(name, 1) for name, count in other_counts.items())
        text = f"this process may open {room.files} files; raise that with ulimit -n"
        bounds.append(Bound((processes - other_processes) // unit.get(role, 1), text))
    if not bounds:
        return None
    tightest = min(bounds, key=lambda bound: bound.maximum)
    return Bound(max(present, tightest.maximum), tightest.reason)
