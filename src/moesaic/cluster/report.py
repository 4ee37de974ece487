"""Snapshots of a cluster for users, admin endpoints and metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from moesaic.cluster.join_listener import JoinListener
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import union
from moesaic.cluster.router import Router
from moesaic.core import paced
from moesaic.core.cluster_status import ClusterCounters, LayerLocality, LayerReplicas, ProcessStatus
from moesaic.core.metrics import ExpertStats
from moesaic.core.placement import Placement, ranges
from moesaic.policy.placement.spreading import on_one_host


def process_status(
    member: Member,
    placement: Placement | None,
    now: float,
    watched: bool = True,
) -> ProcessStatus:
    """Returns the status of one process.

    now: time on the clock of `member.last_seen`. watched: whether the supervisor would restart it.
    """
    stage = Stage.STOPPED if member.stage is Stage.WAITING and not watched else member.stage
    held = union(member.number, (placement,)) if member.role is Role.SERVER else {}
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
        suspected=member.suspected,
        address=member.endpoint.remote if member.joined else member.endpoint.address,
        layers=len(held),
        experts=sum(map(len, held.values())),
        held={layer: ranges(experts) for layer, experts in held.items()},
        devices=", ".join(member.devices),
        kernels=member.kernels,
        threads=member.threads,
        capacity=member.capacity,
        stats=member.stats,
    )


def counters(
    members: Members, router: Router, rebalances: int, door: JoinListener | None = None
) -> ClusterCounters:
    """Returns all counts since the start."""
    workers = router.stats()
    experts = workers.experts
    paces = [experts.pace, *(member.stats.pace for member in members.servers)]
    return ClusterCounters(
        process_deaths=members.past_deaths + sum(member.all_deaths for member in members.all),
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
        refused_connections=0 if door is None else door.dropped,
    )


def layer_replicas(
    placement: Placement | None, servers: Collection[Member], hosts: Mapping[int, str] | None = None
) -> list[LayerReplicas]:
    """Counts the copies of experts in each layer, on servers that serve now. Empty without a placement.

    hosts: server -> its host. None: all are on one.
    Example: expert 0 is on servers 0 and 1, expert 1 on server 1, which is being restarted. Then the experts
    have 1 and 0 copies: 0 is single, 1 is missing, and the copies are {0: "1", 1: "0"}.
    """
    alive = [member.number for member in servers if member.stage is Stage.SERVING]
    found = []
    for layer in () if placement is None else placement.layers:
        assert placement is not None
        copies = np.isin(placement.table(layer), alive).sum(axis=1)
        single, missing = np.flatnonzero(copies == 1).tolist(), np.flatnonzero(copies == 0).tolist()
        alike = {int(count): ranges(np.flatnonzero(copies == count).tolist()) for count in np.unique(copies)}
        counted = int(copies.min()), int(copies.max()), single, missing, alike
        found.append(LayerReplicas(layer, *counted, on_one_host(placement, layer, alive, hosts)))
    return found


def layer_locality(placement: Placement | None, stats: ExpertStats) -> list[LayerLocality]:
    """Returns the local activation rate of each layer of `placement`.

    It is empty if workers have no server of their own rank. Example: layers 1 and 2, 8 pairs sent for each,
    6 and 2 of them to the own server -> rates 0.75 and 0.25.
    """
    layers = () if placement is None else placement.layers
    sent = zip(layers, stats.layer_pairs, stats.local_pairs, strict=False)
    return [LayerLocality(layer, pairs, local, local / max(1, pairs)) for layer, pairs, local in sent]


def paced_source(file: str) -> str:
    """A file of modelled devices, and where its figures are from."""
    return f"{file}: {paced.read(Path(file)).source}"
