"""Frozen snapshots of a cluster for the status page, admin endpoints and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.core.metrics import ExpertServerStats
from moesaic.core.tokens import IntArray


@dataclass(frozen=True)
class ProcessStatus:
    """A member of the cluster and its current process."""

    name: str
    """Role and number, such as "expert server 0"."""
    role: str
    """"attention worker", "prefill worker" or "expert server"."""
    number: int
    """A number that no other member with that role ever gets."""
    stage: str
    """starting, serving, draining, waiting to be restarted, or stopped."""
    pid: int | None
    """None when there is no process now, or when it is on another machine."""
    incarnation: int
    """Counts the processes of this member."""
    deaths: int
    last_failure: str | None
    silent_seconds: float
    """Seconds since its last sign of life."""
    host: str = ""
    """The address of its machine. Empty: it was started on the machine of `moesaic serve`."""
    waiting: str = ""
    """Why the process has no host yet, such as that no node has room. Empty: it has one."""
    suspected: bool = False
    """Whether it is on another host and nothing was heard of it for a second or more."""
    address: str = ""
    """The address at which clients reach an expert server."""
    layers: int = 0
    """Number of layers of which the server holds experts."""
    experts: int = 0
    """(layer, expert) copies that the server holds."""
    held: dict[int, str] = field(default_factory=dict)
    """Layer -> the experts that the server holds, such as "0-11, 20"."""
    devices: str = ""
    """GPUs that its process sees, such as "0, 1". Empty: none, or those of `moesaic` itself."""
    kernels: str = ""
    threads: int = 0
    capacity: float = 0.0
    """Weight of an expert server's share of experts and load, relative to the other servers."""
    stats: ExpertServerStats = field(default_factory=ExpertServerStats)
    """The state of an expert server now, and the counts of all processes of this member."""


@dataclass(frozen=True)
class HostStatus:
    """A host of the cluster."""

    name: str
    """The name of the host in --topology, or its address. Empty: the host of `moesaic serve`."""
    processes: list[str]
    """Names of the members there."""


@dataclass(frozen=True)
class LinkStatus:
    """The link between two hosts."""

    one: str
    other: str
    """Names of the hosts."""
    latency_seconds: float
    """Seconds of one way."""
    bytes_per_second: float
    """Bytes/s of one direction."""
    source: str
    """"file" (--topology), "measured" when a process of the other host joined, or "assumed"."""


@dataclass(frozen=True)
class LayerReplicas:
    """Copies of a layer's experts on servers that serve now."""

    layer: int
    least: int
    """Copies of the expert with the fewest."""
    most: int
    """Copies of the expert with the most."""
    single: list[int]
    """Experts with one copy. Their rows wait when its server dies."""
    missing: list[int]
    """Experts without a copy. Their rows wait now."""
    copies: dict[int, str] = field(default_factory=dict)
    """Number of copies -> the experts that have so many, such as "0-9, 12-23". Covers every expert."""
    one_host: int = 0
    """Number of experts with several copies, all of them on one host. 0 if all servers are on one host."""


@dataclass(frozen=True)
class LayerLocality:
    """Pairs of one layer that attention workers sent, when each of them has an expert server
    of its own rank.
    """

    layer: int
    pairs: int
    """(row, expert) pairs sent so far, including those sent again."""
    local_pairs: int
    """Pairs sent to the server of the worker's own rank."""
    local_activation_rate: float
    """local_pairs / pairs, or 0 while there are none."""


@dataclass(frozen=True)
class Failure:
    """A process that ended, or a change that was reverted."""

    time: float
    """Seconds since 1970."""
    what: str
    """A line that tells the user what happened."""


@dataclass(frozen=True)
class ClusterCounters:
    """Counters since the start of the cluster. They only grow."""

    process_deaths: int = 0
    failovers: int = 0
    """Servers that clients lost or gave up while pairs were outstanding."""
    silent_failovers: int = 0
    """Failovers because of a timeout. The others were broken connections."""
    false_failovers: int = 0
    """Servers that were given up because of a timeout and came back, so they had not died."""
    resent_pairs: int = 0
    """(row, expert) pairs that were sent again."""
    moved_requests: int = 0
    """Requests that another attention worker continued."""
    rebalances: int = 0
    """Changes of the placement to balance the load."""
    missed_ttft: int = 0
    """Requests whose first token came later than --slo-ttft."""
    missed_itl: int = 0
    """Tokens that came later than --slo-itl after the token before."""
    paced_runs: int = 0
    """Runs of all processes that took as long as on a modelled device; 0 without --paced."""
    paced_late: int = 0
    """Runs of paced_runs that took longer here. With more than 2 % of them, a measurement is void."""
    runs: int = 0
    """Steps of attention workers, or runs of a layer with --schedule async and auto."""
    partial_runs: int = 0
    """Runs of them that computed only some of their worker's rows, while others were with experts."""
    far_bytes: int = 0
    """Bytes of rows and answers between attention workers and expert servers of different hosts."""
    refused_connections: int = 0
    """Connections to --cluster-address that were refused: strangers, or processes with another
    secret or version."""
    supervisor_restarts: int = 0
    """Threads of the supervisor that took the place of one that had died or hung."""


@dataclass(frozen=True)
class PlacementSolve:
    """The last solve of placement and dispatch tables from live routing (--rebalance routing).

    Figures are those of the last solve that was judged. Locality and balance are predictions for requests
    that the solver did not see.
    """

    state: str
    """A line that says that the solver runs, that its placement was swapped in, or why not."""
    solves: int = 0
    """Solves that gave a placement."""
    swaps: int = 0
    """Placements that were swapped in."""
    recorded_requests: int = 0
    """Requests recorded for the next solve."""
    recorded_tokens: int = 0
    last: float | None = None
    """When the last solve ended, in seconds since 1970."""
    seconds: float = 0.0
    """How long it took."""
    gain_seconds: float = 0.0
    """Seconds that the new placement was predicted to save over five intervals."""
    cost_seconds: float = 0.0
    """Seconds that the busiest server was predicted to need for its copies."""
    local_before: float = 0.0
    """Share of (token, expert) pairs on the token's own rank, with the placement and tables before."""
    local_after: float = 0.0
    balancedness_before: float = 1.0
    """Mean over the layers of the servers' mean / max load."""
    balancedness_after: float = 1.0


@dataclass(frozen=True)
class ClusterStatus:
    """The state of the whole cluster at one moment."""

    directory_version: int
    placement_version: int | None
    """None while there is no placement."""
    change: str | None
    """A line about the change in progress, or None."""
    processes: list[ProcessStatus]
    replicas: list[LayerReplicas]
    failures: list[Failure]
    """The last failures, oldest first."""
    counters: ClusterCounters
    join_address: str | None = None
    """Address at which processes of other hosts may join."""
    transport: str | None = None
    """Transport to the expert servers of this host: shm or socket. None if there are none."""
    dispatch: str = "least-loaded"
    """How an attention worker is chosen for a request."""
    locality: list[LayerLocality] = field(default_factory=list)
    """The pairs of each layer with routed experts. Empty where workers have no server of their own rank."""
    placement_solve: PlacementSolve | None = None
    """None without --rebalance routing."""
    paced: str | None = None
    """The file of modelled devices whose timing the processes have, and where its figures are from."""
    hosts: list[HostStatus] = field(default_factory=list)
    """The hosts of the processes. The first one is that of `moesaic serve`."""
    links: list[LinkStatus] = field(default_factory=list)
    """The links between any two of the hosts."""
    standbys: list[str] = field(default_factory=list)
    """Hosts with a `moesaic serve --standby-for` that watches this one."""
    watched: bool = True
    """False once the supervisor itself has failed too often to be restarted.

    Requests continue then, but dead processes are not restarted, and the reports of processes are not
    updated.
    """
    health: str = "serving"
    """serving, recovering while processes are restarted, unavailable once that takes too long, or end."""
    outage: str = ""
    """Why requests are not computed now, in words for people. Empty while they are."""
    past_servers: ExpertServerStats = field(default_factory=ExpertServerStats)
    """The counts of expert servers that have left."""


@dataclass(frozen=True)
class KilledStatus(ClusterStatus):
    """The state of the cluster after a process was killed by hand."""

    killed: str = ""
    """What was done to the process, and what follows."""


@dataclass(frozen=True)
class ClusterLoad:
    """The load of the experts."""

    layers: tuple[int, ...]
    pairs: IntArray
    """[L, E] (row, expert) pairs computed so far."""
    balancedness: np.ndarray
    """[L] mean / max over the servers' recent pairs. 1 is perfect."""
