"""Chooses the dispatch rule: which attention worker gets a request (`--dispatch`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moesaic.config import ClusterConfig, DispatchName
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tables import Tables
from moesaic.core.topology import FloatArray
from moesaic.policy.placement.dispatch import (
    Affinity,
    Dispatch,
    RoundRobin,
    Rounds,
    WorkerLoad,
    least_loaded,
)

NO_RANK = -1
"""Rank of a worker that no table knows."""


class RankDispatch:
    """A dispatch rule by the tables' ranks, for workers whose numbers are not their ranks."""

    def __init__(self, dispatch: Dispatch, ranks: Mapping[int, int]) -> None:
        """ranks: worker -> rank."""
        self._dispatch, self._ranks = dispatch, ranks

    def __call__(self, workers: Mapping[int, WorkerLoad], prompt: Sequence[int] = ()) -> int:
        ranked_loads = {
            worker: replace(load, rank=self._ranks.get(worker, NO_RANK)) for worker, load in workers.items()
        }
        return self._dispatch(ranked_loads, prompt)


LinkWorth = Callable[[int, Sequence[int]], FloatArray]
"""Returns [S] what a pair that each server computes is worth for a worker: see `Links.worth`."""


def dispatch_by_tables(
    cluster: ClusterConfig,
    tables: Tables,
    ranks: Mapping[int, int],
    worth: LinkWorth | None = None,
    servers: Sequence[int] = (),
) -> Dispatch:
    """The rule of --dispatch, by other tables. ranks: worker -> rank.

    worth: None: a worker's score counts the pairs of its own rank alone. servers: those of the tables' ranks.
    """
    return RankDispatch(_affinity(cluster, tables, worth, servers), ranks)


def _affinity(
    cluster: ClusterConfig, tables: Tables, worth: LinkWorth | None, servers: Sequence[int]
) -> Affinity | Rounds:
    by_worker = None if worth is None else lambda worker: worth(worker, servers)
    rounds = cluster.dispatch == "affinity-rounds"
    return Rounds(tables, by_worker) if rounds else Affinity(tables, worth=by_worker)


def read_tables(cluster: ClusterConfig, placement: Placement | None) -> Tables | None:
    """The tables beside --placement. None if there are none, or if workers have no servers of their rank."""
    if cluster.placement is None or placement is None or not cluster.enable_expert_parallel:
        return None
    return Tables.load_for(cluster.placement, placement)


def choose_dispatch(
    cluster: ClusterConfig, placement: Placement | None, worth: LinkWorth | None = None
) -> tuple[DispatchName, Dispatch]:
    """Returns the name of the dispatch rule, and the rule itself.

    placement: what the file of --placement specifies. worth: see `by_tables`.
    Without --dispatch the rule is affinity if the placement has tables, and each worker has a server of its
    own rank or --topology says which servers are near; otherwise it is least-loaded. A worker's rank is its
    number, which a restarted worker keeps. With --rebalance routing tables come later. With --rebalance load
    experts leave the ranks that tables name, so these are not used. Raises ConfigError
    for `affinity` without tables, and for tables that cannot be read.
    """
    name = cluster.dispatch
    if name == "round-robin":
        return name, RoundRobin()
    has_near_servers = cluster.enable_expert_parallel or cluster.topology is not None
    if name == "least-loaded" or (name is None and not has_near_servers):
        return "least-loaded", least_loaded
    file = cluster.placement
    tables = None
    if file is not None and placement is not None and cluster.rebalance != "load":
        tables = Tables.load_for(file, placement)
    if tables is not None:
        return name or "affinity", _affinity(cluster, tables, worth, range(tables.ranks))
    if name in ("affinity", "affinity-rounds") and cluster.rebalance != "routing":
        choices = "least-loaded, round-robin; affinity with expert servers and a --placement that has tables"
        choices += ", without --rebalance load" if cluster.rebalance == "load" else ""
        raise ConfigError.field("--dispatch", name, choices)
    return "least-loaded", least_loaded
