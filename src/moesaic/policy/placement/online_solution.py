"""Solves a placement and its tables from live routing, and predicts what the swap would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.placement import NO_SERVER, Placement
from moesaic.core.profile import Profile, Routes, SmallArray
from moesaic.core.tables import Tables
from moesaic.policy.placement import around_homes, predict
from moesaic.policy.placement.link_prices import worth_of
from moesaic.policy.placement.locality import (
    FloatArray,
    Rule,
    balancedness,
    homes_in,
    hosts,
    measure,
    request_ranks,
    request_scores,
)
from moesaic.policy.placement.online import Forecast
from moesaic.policy.placement.solvers import SOLVERS
from moesaic.policy.placement.solvers.align import match_numbers
from moesaic.policy.placement.solvers.link_aware import solve_for_links

SHARE = 0.75
"""Share of the recorded requests that the solver sees. The forecasts are made on the others."""
NUMBER_BYTES = 4
"""Bytes of one number of a row between ranks (float32)."""


@dataclass(frozen=True)
class Fleet:
    """The servers that a placement is for."""

    ranks: tuple[int, ...]
    """The expert server of each rank."""
    capacities: dict[int, float]
    """Server -> capacity weight, of the ranks' servers and of others that joined."""
    redundant: int = 0
    """Copies in each layer beyond one of each expert."""
    min_replicas: int = 1
    prices: tuple[tuple[float, ...], ...] = ()
    """[R][S] seconds of a byte from each rank to each of `servers`. Empty: all links are alike."""
    hosts: tuple[str, ...] = ()
    """[S] the host of each of `servers`. Empty: all are on one host."""

    @property
    def servers(self) -> tuple[int, ...]:
        """All servers, those of the ranks first."""
        return self.ranks + tuple(sorted(set(self.capacities) - set(self.ranks)))


@dataclass(frozen=True)
class Solution:
    """A placement that may be swapped in."""

    homes: Placement
    """A single copy of each expert, on the server of the rank that the tables name."""
    placement: Placement
    """The same with the further copies that the fleet should have."""
    tables: Tables
    old_forecast: Forecast
    """The present placement and tables, on requests that the solver did not see."""
    new_forecast: Forecast


def solve(
    profile: Profile,
    present: Placement,
    tables: Tables | None,
    fleet: Fleet,
    solver: str = "ours",
    rule: Rule = "affinity",
    seed: int = 0,
) -> Solution:
    """Solve on a share of the recorded requests, and forecast on the others. The links are priced.

    tables: those by which requests are dispatched now; None: by load. rule: how tables dispatch requests.
    The ranks are numbered so that as many experts as possible stay where they are.
    """
    train_routes, test_routes = profile.routes.split(SHARE, seed)
    train_profile = profile.with_routes(train_routes)
    ranks = len(fleet.ranks)
    clusters = SOLVERS[solver](train_profile, ranks, seed)
    clusters = _renumber_ranks(clusters, present, profile.layers, fleet)
    if fleet.prices:
        clusters = solve_for_links(train_profile, clusters, np.array(fleet.prices)[:, :ranks], seed)
    homes = _on_servers(clusters, profile, fleet, present.version + 1)
    least = min(fleet.min_replicas, len(fleet.capacities))
    placement = around_homes.place(
        *(homes, profile.loads, profile.layers, fleet.capacities, fleet.redundant, least),
        hosts=dict(zip(fleet.servers, fleet.hosts, strict=False)),
    )
    new_tables = predict.build(train_profile, clusters)
    old_tables = tables if tables is not None and tables.ranks == ranks else None
    return Solution(
        homes=homes,
        placement=placement,
        tables=new_tables,
        old_forecast=_forecast(present, old_tables, profile, test_routes, fleet, rule),
        new_forecast=_forecast(placement, new_tables, profile, test_routes, fleet, rule),
    )


def _renumber_ranks(
    clusters: Coclusters, present: Placement, layers: Sequence[int], fleet: Fleet
) -> Coclusters:
    """`clusters` with its ranks numbered as the servers that hold most of their experts now."""
    had_expert = np.full((len(fleet.ranks), *clusters.experts.shape), False)
    for rank, server in enumerate(fleet.ranks):
        for row, layer in enumerate(layers):
            had_expert[rank, row, list(present.experts_of(server, layer))] = True
    numbers = match_numbers(clusters.experts, had_expert)
    return replace(clusters, experts=numbers[clusters.experts], tokens=numbers[clusters.tokens])


def _on_servers(clusters: Coclusters, profile: Profile, fleet: Fleet, version: int) -> Placement:
    experts_by_layer = {
        layer: {server: np.flatnonzero(row == rank).tolist() for rank, server in enumerate(fleet.ranks)}
        for layer, row in zip(profile.layers, clusters.experts, strict=True)
    }
    return Placement(version, profile.num_experts, experts_by_layer, profile.model)


def _forecast(
    placement: Placement, tables: Tables | None, profile: Profile, routes: Routes, fleet: Fleet, rule: Rule
) -> Forecast:
    """What the placement does with `routes`. Without tables, requests go to the ranks in turn."""
    ranks, servers = len(fleet.ranks), fleet.servers
    prices = np.array(fleet.prices) if fleet.prices else None
    worth = None if prices is None else worth_of(prices[:, :ranks])
    own_ranks = (np.arange(routes.requests) % ranks).astype(np.int16)
    if tables is not None:
        scores = request_scores(tables.scores.astype(np.float64), routes)
        own_ranks = request_ranks(scores, np.diff(routes.starts), rule, worth)
    homes = _indices(homes_in(placement, profile.layers), servers)
    own_ranks = own_ranks[routes.owners]
    locality = measure(routes.experts, homes, own_ranks, len(servers), prices)
    capacity = np.array([fleet.capacities[server] for server in servers])
    return Forecast(
        local=locality.rate,
        remote_bytes=locality.remote_bytes(profile.hidden, NUMBER_BYTES),
        critical=float((locality.loads / capacity).max(axis=1).sum()),
        balancedness=float(balancedness(locality.loads).mean()),
        link_seconds=None
        if prices is None
        else _link_seconds(routes, homes, own_ranks, prices, profile.hidden),
    )


def _link_seconds(
    routes: Routes, homes: SmallArray, own_ranks: SmallArray, prices: FloatArray, hidden: int
) -> float:
    """Seconds that the rows of a token's remote pairs take there and back. own_ranks: [t] rank of each
    token."""
    ranks_by_layer = np.broadcast_to(own_ranks[:, None], routes.experts.shape[:2])
    pair_ranks = hosts(routes.experts, homes, ranks_by_layer, prices)
    return (
        float(prices[own_ranks[:, None, None], pair_ranks].sum() / len(own_ranks)) * 2 * hidden * NUMBER_BYTES
    )


def _indices(homes: SmallArray, servers: Sequence[int]) -> SmallArray:
    """`homes` [layers, E, copies] with places in `servers` in place of servers, valid ones first.

    Copies on other servers, which have left, count as none.
    """
    places = np.full(max(NO_SERVER, int(homes.max()), *servers) + 2, NO_SERVER, dtype=np.int16)
    places[list(servers)] = np.arange(len(servers))
    indices = places[homes]  # NOBODY, -1, reads the last entry, which is NOBODY
    order = np.argsort(indices == NO_SERVER, axis=2, kind="stable")
    return np.take_along_axis(indices, order, axis=2)
