"""The placement that a cluster starts with: from a file, or by the servers' capacities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesaic.config import ClusterConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.placement import around_homes, balance


def read_placement(cluster: ClusterConfig) -> Placement | None:
    """Reads the placement of the expert servers in the file of --placement; None if there is none.

    Raises ConfigError for a file that cannot be read or that names other servers.
    """
    if cluster.placement is None or cluster.expert_servers == 0:
        return None
    return Placement.read(cluster.placement, cluster.expert_servers)


def first_placement(
    layout: ExpertLayout,
    cluster: ClusterConfig,
    capacities: Mapping[int, float],
    placement: Placement | None,
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """Returns the placement that `cluster`'s servers, numbered from 0, start with.

    capacities: server -> weight. placement: see `read_placement`; the copies that `cluster` asks for are
    added to it. hosts: server -> its host; None: all are on one. Raises ConfigError if it was made for
    another model.
    """
    name = layout.fingerprint
    if placement is not None:
        placement = placement.covering(layout.prediction)
        placement.check(name, layout.layers, layout.num_experts)
    load = np.ones((len(layout.layers), layout.num_experts))
    redundant, least = cluster.redundant_experts, cluster.min_replicas
    if placement is not None:
        return around_homes.place(placement, load, layout.layers, capacities, redundant, least, hosts=hosts)
    return balance.place(load, layout.layers, capacities, redundant, least, model=name, hosts=hosts)
