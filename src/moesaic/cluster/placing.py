"""The placement that a cluster starts with: from a file, or a share for each server by its capacity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesaic.config import ClusterConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.placement import balance


def first_placement(
    layout: ExpertLayout, cluster: ClusterConfig, capacities: Mapping[int, float]
) -> Placement:
    """Of `cluster`'s servers, numbered from 0. Raises ConfigError for a file that does not fit.

    capacities: server -> weight.
    """
    name = layout.fingerprint
    if cluster.placement is not None:
        placement = Placement.read(cluster.placement, cluster.expert_servers)
        placement.check(name, layout.layers, layout.num_experts)
        return placement
    load = np.ones((len(layout.layers), layout.num_experts))
    redundant, least = cluster.redundant_experts, cluster.min_replicas
    return balance.place(load, layout.layers, capacities, redundant, least, model=name)
