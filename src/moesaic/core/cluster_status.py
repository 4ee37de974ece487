"""A cluster as people, admin endpoints and metrics see it: frozen snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.core.metrics import ExpertServerStats
from moesaic.core.tokens import IntArray


@dataclass(frozen=True)
class ProcessStatus:
    """One place in the cluster and the process that has it."""

    name: str
    """Role and number, such as "expert server 0"."""
    role: str
    """"attention worker" or "expert server"."""
    number: int
    """Never used for another one of that role."""
    stage: str
    """starting, serving, draining, waiting to be restarted, or stopped."""
    pid: int | None
    """None: there is none now, or it is on another machine."""
    incarnation: int
    """Counts its processes."""
    deaths: int
    last_failure: str | None
    silent_seconds: float
    """Since its last sign of life."""
    address: str = ""
    """Of an expert server: where clients find it."""
    layers: int = 0
    """Of which it holds experts."""
    experts: int = 0
    """(layer, expert) copies that it holds."""
    held: dict[int, str] = field(default_factory=dict)
    """Layer -> the experts that it holds, such as "0-11, 20"."""
    kernels: str = ""
    threads: int = 0
    capacity: float = 0.0
    """Of an expert server: weight of its share of experts and of load, beside the others'."""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)


@dataclass(frozen=True)
class LayerReplicas:
    """Copies of a layer's experts on servers that serve now."""

    layer: int
    least: int
    """Copies of the expert with the fewest."""
    most: int
    single: list[int]
    """Experts with one copy: they wait when its server dies."""
    missing: list[int]
    """Experts without any: they wait now."""
    copies: dict[int, str] = field(default_factory=dict)
    """Number of copies -> the experts that have so many, such as "0-9, 12-23"; of every expert."""


@dataclass(frozen=True)
class LayerLocality:
    """What attention workers beside an expert server asked it for."""

    layer: int
    pairs: int
    """(row, expert) pairs that they sent so far, those sent again included."""
    local_pairs: int
    """Of those, pairs for the server of the worker's own rank."""
    local_activation_rate: float
    """local_pairs / pairs; 0 while there are none."""


@dataclass(frozen=True)
class Failure:
    """A process that ended, or a change that was taken back."""

    time: float
    """Seconds since 1970."""
    what: str
    """One line for a person."""


@dataclass(frozen=True)
class ClusterCounters:
    """Only grow."""

    process_deaths: int = 0
    failovers: int = 0
    """Servers that clients lost or gave up with rows outstanding."""
    silent_failovers: int = 0
    """Of those, servers given up for their silence; the others' connections broke."""
    false_failovers: int = 0
    """Of those, servers that came back: they had not died."""
    resent_pairs: int = 0
    """(row, expert) pairs that were sent again."""
    moved_requests: int = 0
    """Requests that went on with another attention worker."""
    rebalances: int = 0
    """Changes of the placement for the sake of balance."""
    missed_ttft: int = 0
    """Requests whose first token came later than --slo-ttft."""
    missed_itl: int = 0
    """Tokens that came later than --slo-itl after the one before."""


@dataclass(frozen=True)
class ClusterStatus:
    """All of it at one moment."""

    directory_version: int
    placement_version: int | None
    """None while there is no placement."""
    change: str | None
    """What is being changed now, for a person."""
    processes: list[ProcessStatus]
    replicas: list[LayerReplicas]
    failures: list[Failure]
    """The last ones, oldest first."""
    counters: ClusterCounters
    join_address: str | None = None
    """Where expert servers of other machines may join."""
    transport: str | None = None
    """To the expert servers of this host: shm or socket. None: there are none."""
    dispatch: str = "least-loaded"
    """How requests find their attention worker."""
    locality: list[LayerLocality] = field(default_factory=list)
    """Of each layer with routed experts; empty where workers have no server beside them."""
    watched: bool = True
    """False once the supervisor itself has failed: requests go on, but what dies stays dead, and what
    processes report of themselves is as old as that."""


@dataclass(frozen=True)
class ClusterLoad:
    """What the experts did."""

    layers: tuple[int, ...]
    pairs: IntArray
    """[L, E] (row, expert) pairs computed so far."""
    balancedness: np.ndarray
    """[L] mean / max over the servers' pairs of late: 1 is perfect."""
