"""Which rule gives requests to attention workers: what `--dispatch` comes to with this cluster."""

from __future__ import annotations

from pathlib import Path

from moesaic.config import ClusterConfig, DispatchName
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tables import Tables
from moesaic.policy.dispatch import Affinity, Dispatch, RoundRobin, least_loaded


def dispatch_of(cluster: ClusterConfig) -> tuple[DispatchName, Dispatch]:
    """Its name, and the rule itself. Raises ConfigError for `affinity` without tables, or for bad ones.

    Where nothing is asked for it is affinity if the placement has tables and each worker has a server beside
    it, else least-loaded. A worker's rank is its number: what dies comes back with its own.
    """
    name = cluster.dispatch
    if name == "round-robin":
        return name, RoundRobin()
    colocated = cluster.enable_expert_parallel
    if name == "least-loaded" or (name is None and not colocated):
        return "least-loaded", least_loaded
    tables = None if cluster.expert_servers == 0 else _tables(cluster)
    if tables is not None:
        return "affinity", Affinity(tables)
    if name == "affinity":
        allowed = "least-loaded, round-robin without a --placement of expert servers that names its tables"
        raise ConfigError.field("--dispatch", name, allowed)
    return "least-loaded", least_loaded


def _tables(cluster: ClusterConfig) -> Tables | None:
    """Those that the placement names, if it does."""
    if cluster.placement is None:
        return None
    placement = Placement.read(cluster.placement, cluster.expert_servers)
    if not placement.tables:
        return None
    file = Path(cluster.placement).parent / placement.tables
    tables = Tables.load(file)
    tables.check(placement, str(file))
    return tables
