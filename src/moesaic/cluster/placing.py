"""The placement that a cluster starts with: from a file, or an equal share for each server."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.placement import Placement, fingerprint
from moesaic.policy import balance


def first_placement(layout: ExpertLayout, cluster: ClusterConfig) -> Placement:
    """Of `cluster`'s servers, numbered from 0. Raises ConfigError for a file that does not fit."""
    name = model_name(layout)
    servers = range(cluster.expert_servers)
    if cluster.placement is not None:
        return _from_file(Path(cluster.placement), name, layout, len(servers))
    load = np.ones((len(layout.layers), layout.num_experts))
    weights = dict.fromkeys(servers, 1.0)
    least = cluster.min_replicas
    return balance.place(load, layout.layers, weights, cluster.redundant_experts, least, model=name)


def model_name(layout: ExpertLayout) -> str:
    """What a placement file of this model says it is for."""
    return fingerprint("moe", layout.layers, layout.num_experts, layout.hidden, layout.width)


def _from_file(file: Path, name: str, layout: ExpertLayout, servers: int) -> Placement:
    try:
        placement = Placement.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--placement: {file}: {error.strerror}") from error
    placement.check(name, layout.layers, layout.num_experts)
    strangers = set(placement.servers) - set(range(servers))
    if strangers:
        raise ConfigError.field("--placement", f"server {min(strangers)}", f"0 to {servers - 1}")
    return placement
