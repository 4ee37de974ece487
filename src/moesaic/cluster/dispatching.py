"""Which rule gives requests to attention workers: what `--dispatch` comes to with this cluster."""

from __future__ import annotations

from moesaic.config import ClusterConfig, DispatchName
from moesaic.core.errors import ConfigError
from moesaic.core.tables import Tables
from moesaic.policy.placement.dispatch import Affinity, Dispatch, RoundRobin, Rounds, least_loaded


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
    file, servers = cluster.placement, cluster.expert_servers
    tables = None if file is None or servers == 0 else Tables.beside(file, servers)
    if tables is not None:
        return (name, Rounds(tables)) if name == "affinity-rounds" else ("affinity", Affinity(tables))
    if name in ("affinity", "affinity-rounds"):
        allowed = "least-loaded, round-robin; affinity with expert servers and a --placement that has tables"
        raise ConfigError.field("--dispatch", name, allowed)
    return "least-loaded", least_loaded
