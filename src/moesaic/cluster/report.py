"""Snapshots of a cluster for users, admin endpoints and metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from moesaic.cluster.join_listener import JoinListener
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.publishing import union
from moesaic.cluster.router import Router
from moesaic.cluster.totals import PastMembers
from moesaic.core import paced_devices
from moesaic.core.cluster_status import ClusterCounters, LayerLocality, LayerReplicas, ProcessStatus
from moesaic.core.metrics import ExpertStats
from moesaic.core.placement import Placement, ranges
from moesaic.policy.placement.spreading import on_one_host


def process_status(
    member: Member,
    placement: Placement | None,
    now: float,
    is_supervised: bool = True,
) -> ProcessStatus:
    """Returns the status of one process.

    now: time on the clock of `member.last_seen`. is_supervised: whether the supervisor would restart it.
    """
    stage = Stage.STOPPED if member.stage is Stage.WAITING and not is_supervised else member.stage
    experts_by_layer = (
        {}
        if placement is None or member.role is not Role.SERVER
        else _experts_by_layer(PlacementKey(placement), member.number)
    )
    child = member.child
    return ProcessStatus(
        name=member.name,
        role=member.role.value,
        number=member.number,
        stage=stage.value,
        pid=None if child is None else child.pid,
        incarnation=member.incarnation,
        deaths=member.all_deaths,
        last_failure=member.last_failure,
        silent_seconds=round(max(0.0, now - member.last_seen), 3),
        host=member.host,
        waiting=member.waiting,
        suspected=member.is_suspected,
        address=member.endpoint.remote if member.has_tcp_connection else member.endpoint.address,
        layers=len(experts_by_layer),
        experts=sum(count for _, count in experts_by_layer.values()),
        held={layer: text for layer, (text, _) in experts_by_layer.items()},
        devices=", ".join(member.devices),
        kernels=member.kernels,
        threads=member.threads,
        capacity=member.capacity,
        stats=member.stats,
    )


def counters(
    members: Collection[Member],
    past_members: PastMembers,
    router: Router,
    rebalances: int,
    listener: JoinListener | None = None,
    supervisor_restarts: int = 0,
) -> ClusterCounters:
    """Returns all counts since the start. members: those that have not left."""
    workers = router.stats()
    experts = workers.experts
    paces = [experts.pace, past_members.server_stats.pace, *(member.stats.pace for member in members)]
    return ClusterCounters(
        process_deaths=past_members.deaths + sum(member.all_deaths for member in members),
        failovers=experts.failovers,
        silent_failovers=experts.silent_failovers,
        false_failovers=experts.false_failovers,
        resent_pairs=experts.resent_pairs,
        moved_requests=router.moved_requests,
        rebalances=rebalances,
        missed_ttft=router.objectives.missed_ttft,
        missed_itl=router.objectives.missed_itl,
        paced_runs=sum(pace.runs for pace in paces),
        paced_late=sum(pace.late for pace in paces),
        runs=workers.steps,
        partial_runs=workers.partial_runs,
        far_bytes=experts.far_bytes,
        refused_connections=0 if listener is None else listener.num_dropped,
        supervisor_restarts=supervisor_restarts,
    )


def layer_replicas(
    placement: Placement | None, servers: Collection[Member], hosts: Mapping[int, str] | None = None
) -> list[LayerReplicas]:
    """Counts the copies of experts in each layer, on servers that serve now. Empty without a placement.

    hosts: server -> its host. None: all are on one.
    Example: expert 0 is on servers 0 and 1, expert 1 on server 1, which is being restarted. Then the experts
    have 1 and 0 copies: 0 is single, 1 is missing, and the copies are {0: "1", 1: "0"}.
    """
    alive = tuple(member.number for member in servers if member.stage is Stage.SERVING)
    sorted_hosts = None if hosts is None else tuple(sorted(hosts.items()))
    return [] if placement is None else list(_layer_replicas(PlacementKey(placement), alive, sorted_hosts))


@dataclass(frozen=True, eq=False)
class PlacementKey:
    """A placement as a key: equal to itself alone. Placements never change, and comparing them takes long."""

    placement: Placement

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementKey) and other.placement is self.placement

    def __hash__(self) -> int:
        return id(self.placement)


@lru_cache(maxsize=256)
def _experts_by_layer(key: PlacementKey, server: int) -> dict[int, tuple[str, int]]:
    """Layer -> the experts of a server as ranges, and their number. A live page asks twice a second."""
    experts_by_layer = union(server, (key.placement,))
    return {layer: (ranges(experts), len(experts)) for layer, experts in experts_by_layer.items()}


@lru_cache(maxsize=2)
def _layer_replicas(
    key: PlacementKey, alive: tuple[int, ...], hosts: tuple[tuple[int, str], ...] | None
) -> tuple[LayerReplicas, ...]:
    """What `layer_replicas` counts on the servers that are alive."""
    placement, by_server = key.placement, None if hosts is None else dict(hosts)
    layers = []
    for layer in placement.layers:
        copies = np.isin(placement.table(layer), alive).sum(axis=1)
        single, missing = np.flatnonzero(copies == 1).tolist(), np.flatnonzero(copies == 0).tolist()
        alike = {int(count): ranges(np.flatnonzero(copies == count).tolist()) for count in np.unique(copies)}
        counts = int(copies.min()), int(copies.max()), single, missing, alike
        layers.append(LayerReplicas(layer, *counts, on_one_host(placement, layer, list(alive), by_server)))
    return tuple(layers)


def layer_locality(placement: Placement | None, stats: ExpertStats) -> list[LayerLocality]:
    """Returns the local activation rate of each layer of `placement`.

    It is empty if workers have no server of their own rank. Example: layers 1 and 2, 8 pairs sent for each,
    6 and 2 of them to the own server -> rates 0.75 and 0.25.
    """
    layers = () if placement is None else placement.layers
    pairs_by_layer = zip(layers, stats.layer_pairs, stats.local_pairs, strict=False)
    return [
        LayerLocality(layer, pairs, local, local / max(1, pairs)) for layer, pairs, local in pairs_by_layer
    ]


def describe_pace(file: str) -> str:
    """A file of modelled devices, and where its figures are from."""
    return f"{file}: {paced_devices.read(Path(file)).source}"
