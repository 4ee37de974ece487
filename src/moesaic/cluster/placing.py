"""The placement that a cluster starts with: from a file, or an equal share for each server."""

from __future__ import annotations

import numpy as np

from moesaic.config import ClusterConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy import balance


def first_placement(layout: ExpertLayout, cluster: ClusterConfig) -> Placement:
    """Of `cluster`'s servers, numbered from 0. Raises ConfigError for a file that does not fit."""
    name = layout.fingerprint
    servers = range(cluster.expert_servers)
    if cluster.placement is not None:
        placement = Placement.read(cluster.placement, len(servers))
        placement.check(name, layout.layers, layout.num_experts)
        return placement
    load = np.ones((len(layout.layers), layout.num_experts))
    weights = dict.fromkeys(servers, 1.0)
    least = cluster.min_replicas
    return balance.place(load, layout.layers, weights, cluster.redundant_experts, least, model=name)
