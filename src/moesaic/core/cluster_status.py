"""The status of a cluster for people, admin endpoints and metrics: frozen snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.core.metrics import ExpertServerStats
from moesaic.core.tokens import IntArray


@dataclass(frozen=True)
class ProcessStatus:
    """One process of the cluster."""

    name: str
    """Role and number, such as "expert server 0"."""
    role: str
    """"attention worker" or "expert server"."""
    number: int
    """Number within the role. It is never reused."""
    stage: str
    """starting, serving, draining, waiting to be restarted, or stopped."""
    pid: int | None
    """Process id. None: no process runs now, or it runs on another machine."""
    incarnation: int
    """Number of processes that have had this role and number so far."""
    deaths: int
    last_failure: str | None
    silent_seconds: float
    """Seconds since the last sign of life."""
    address: str = ""
    """Of an expert server: the address where clients find it."""
    layers: int = 0
    """Number of layers of which it holds experts."""
    experts: int = 0
    """Number of (layer, expert) copies that it holds."""
    held: dict[int, str] = field(default_factory=dict)
    """Layer -> the experts that it holds, such as "0-11, 20"."""
    kernels: str = ""
    threads: int = 0
    capacity: float = 0.0
    """Of an expert server: capacity weight, which sets its share of experts and load."""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)


@dataclass(frozen=True)
class LayerReplicas:
    """Copies of a layer's experts on servers that serve now."""

    layer: int
    least: int
    """Copies of the expert that has the fewest."""
    most: int
    single: list[int]
    """Experts with one copy. Their requests wait if its server dies."""
    missing: list[int]
    """Experts without a copy. Their requests wait now."""
    copies: dict[int, str] = field(default_factory=dict)
    """Number of copies -> the experts that have this number, such as "0-9, 12-23"."""


@dataclass(frozen=True)
class LayerLocality:
    """How many pairs attention workers sent to the expert servers of their own rank."""

    layer: int
    pairs: int
    """(row, expert) pairs sent so far, including pairs that were sent again."""
    local_pairs: int
    """Those of the pairs that went to the server of the worker's own rank."""
    local_activation_rate: float
    """local_pairs / pairs; 0 without pairs."""


@dataclass(frozen=True)
class Failure:
    """A process that ended, or a change that was undone."""

    time: float
    """Seconds since 1970."""
    what: str
    """One line for people."""


@dataclass(frozen=True)
class ClusterCounters:
    """Counters; they never decrease."""

    process_deaths: int = 0
    failovers: int = 0
    """Servers that clients lost or gave up while rows were outstanding."""
    silent_failovers: int = 0
    """Those of them that did not answer in time; the connections of the others broke."""
    false_failovers: int = 0
    """Those of them that had not died: they answered later."""
    resent_pairs: int = 0
    """(row, expert) pairs that were sent again."""
    moved_requests: int = 0
    """Requests that another attention worker continued."""
    rebalances: int = 0
    """Placement changes made for balance."""
    missed_ttft: int = 0
    """Requests whose first token came later than --slo-ttft."""
    missed_itl: int = 0
    """Tokens that came later than --slo-itl after the previous token."""


@dataclass(frozen=True)
class ClusterStatus:
    """The whole cluster at one moment."""

    directory_version: int
    placement_version: int | None
    """None: there is no placement yet."""
    change: str | None
    """Description of the change under way, for people."""
    processes: list[ProcessStatus]
    replicas: list[LayerReplicas]
    failures: list[Failure]
    """The most recent failures, oldest first."""
    counters: ClusterCounters
    join_address: str | None = None
    """Address where expert servers of other machines may join; None: none may."""
    transport: str | None = None
    """Transport to the expert servers of this host: shm or socket. None: there are no such servers."""
    dispatch: str = "least-loaded"
    """Name of the dispatch rule."""
    locality: list[LayerLocality] = field(default_factory=list)
    """Locality of each layer with routed experts; empty if workers have no server of their own rank."""
    watched: bool = True
    """False once the supervisor has failed. Requests go on, but dead processes are not restarted, and what
    processes report of themselves is as old as the failure."""


@dataclass(frozen=True)
class ClusterLoad:
    """The load of the experts."""

    layers: tuple[int, ...]
    pairs: IntArray
    """[L, E] (row, expert) pairs computed so far."""
    balancedness: np.ndarray
    """[L] mean / max of the servers' recent pairs; 1 is perfect balance."""
