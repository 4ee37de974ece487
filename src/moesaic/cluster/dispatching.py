"""Chooses the dispatch rule: which attention worker gets a request (`--dispatch`)."""

from __future__ import annotations

from moesaic.config import ClusterConfig, DispatchName
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tables import Tables
from moesaic.policy.placement.dispatch import Affinity, Dispatch, RoundRobin, Rounds, least_loaded


def dispatch_of(cluster: ClusterConfig, placement: Placement | None) -> tuple[DispatchName, Dispatch]:
    """Returns the name of the dispatch rule, and the rule itself.

    placement: what the file of --placement specifies. Without --dispatch the rule is affinity if the
    placement has tables and each worker has a server of its own rank; otherwise it is least-loaded. A
    worker's rank is its number, which a restarted worker keeps. Raises ConfigError for `affinity` without
    tables, and for tables that cannot be read.
    """
    name = cluster.dispatch
    if name == "round-robin":
        return name, RoundRobin()
    colocated = cluster.enable_expert_parallel
    if name == "least-loaded" or (name is None and not colocated):
        return "least-loaded", least_loaded
    file = cluster.placement
    tables = None if file is None or placement is None else Tables.beside(file, placement)
    if tables is not None:
        return (name, Rounds(tables)) if name == "affinity-rounds" else ("affinity", Affinity(tables))
    if name in ("affinity", "affinity-rounds"):
        allowed = "least-loaded, round-robin; affinity with expert servers and a --placement that has tables"
        raise ConfigError.field("--dispatch", name, allowed)
    return "least-loaded", least_loaded
