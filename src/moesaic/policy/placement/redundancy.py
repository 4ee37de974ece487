"""Adds copies of experts on the ranks with the tokens that choose them most.

`policy.placement.balance` knows only loads, so its copies serve balance alone. This module also knows the
ranks of the tokens. A copy on their rank makes their choices local. Each further copy of a layer is the one
with the largest

    choices that become local  +  choices that the layer's busiest rank is relieved of

so locality and balance are measured in one unit. A token's choice is computed on its own rank if that has a
copy; else the copies share it evenly. No rank gets more than its share of the new copies, rounded up.

Where links have prices, a choice is computed by the copies that are worth most for the token's rank
(`link_prices`), and a copy's first term is the worth that choices gain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.tables import Tables
from moesaic.policy.placement import predict
from moesaic.policy.placement.link_prices import worth_of
from moesaic.policy.placement.locality import FloatArray, homes_in, token_scores
from moesaic.policy.placement.packing import BoolArray


def place(
    profile: Profile,
    clusters: Coclusters,
    redundant: int = 0,
    tables: str = "",
    prices: FloatArray | None = None,
) -> Placement:
    """The clusters' placement with `redundant` more copies in each layer. tables: name of the tables' file.

    prices: [R, R] seconds of a byte from each rank to each rank's server. None: all links are alike. Raises
    ConfigError if `redundant` exceeds the copies that are possible, one of each expert on each rank.
    """
    placement = clusters.placement(profile.layers, profile.model, tables)
    max_redundant = profile.num_experts * (clusters.ranks - 1)
    if not 0 <= redundant <= max_redundant:
        raise ConfigError.field(
            "--redundant-experts", redundant, f"0 to {max_redundant}: each expert once on a rank"
        )
    if not redundant:
        return placement
    worth = np.eye(clusters.ranks) if prices is None else worth_of(prices)
    experts_by_layer = {}
    for row, layer in enumerate(profile.layers):
        home = clusters.experts[row][:, None] == np.arange(clusters.ranks)
        has_copy = add_copies(demand(profile, clusters, row), home, redundant, worth)
        experts_by_layer[layer] = {
            rank: np.flatnonzero(column).tolist() for rank, column in enumerate(has_copy.T)
        }
    return replace(placement, experts_by_layer=experts_by_layer)


def tables_of(profile: Profile, clusters: Coclusters, placement: Placement) -> Tables:
    """Build the tables for `placement`: the experts of `clusters`, possibly with more copies."""
    tables = predict.build(profile, clusters)
    homes = homes_in(placement, profile.layers)
    if homes.shape[2] == 1:
        return tables
    scores = profile.top_k * token_scores(profile, homes, clusters.ranks)
    return replace(tables, scores=scores.astype(np.float32))


def demand(profile: Profile, clusters: Coclusters, layer: int) -> FloatArray:
    """[E, ranks] how often the tokens of each rank choose each expert. layer: counted from 0."""
    counts, size, ranks = profile.counts[layer], profile.num_experts, clusters.ranks
    keys = counts.experts.astype(np.int64) * ranks + clusters.tokens[layer][counts.tokens]
    num_choices = np.bincount(keys, counts.counts, minlength=size * ranks)
    return num_choices.reshape(size, ranks).astype(np.float64)


def add_copies(
    rank_choices: FloatArray, home: BoolArray, redundant: int, worth: FloatArray | None = None
) -> BoolArray:
    """[E, N] True where a rank has the expert, after `redundant` copies were added.

    rank_choices: [E, N] from `demand`. home: [E, N] the placement before. worth: [N, N] of
    `link_prices.worth_of`. None: only choices on the token's own rank count.

    Example: experts 0 and 1 are on rank 0, 2 and 3 on rank 1. wanted is 5 4, 5 0, 0 1, 0 5, so loads are 14
    and 6. A copy of expert 0 on rank 1 makes 4 choices local and relieves rank 0 of 4. Its value of 8 is
    the largest.
    """
    worth = np.eye(home.shape[1]) if worth is None else worth
    has_copy = home.copy()
    room = np.full(has_copy.shape[1], -(-redundant // has_copy.shape[1]))
    for _ in range(redundant):
        expert, rank = divmod(
            int(_values(rank_choices, has_copy, room > 0, worth).argmax()), has_copy.shape[1]
        )
        has_copy[expert, rank] = True
        room[rank] -= 1
    return has_copy


def _values(rank_choices: FloatArray, has_copy: BoolArray, free: BoolArray, worth: FloatArray) -> FloatArray:
    """[E, N] value of one more copy of each expert on each rank, or minus infinity if it is not possible."""
    rank_pairs, best = _route_choices(rank_choices, has_copy, worth)
    loads = rank_pairs.sum(axis=0)
    values = np.full(has_copy.shape, -np.inf)
    for rank in np.flatnonzero(free).tolist():
        copies_after = has_copy.copy()
        copies_after[:, rank] = True
        pairs_after, better = _route_choices(rank_choices, copies_after, worth)
        busiest = (loads - rank_pairs + pairs_after).max(axis=1)
        values[:, rank] = (rank_choices * (better - best)).sum(axis=1) + loads.max() - busiest
    values[has_copy] = -np.inf
    return values


def _route_choices(
    rank_choices: FloatArray, has_copy: BoolArray, worth: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[E, N] choices of each expert that each rank computes, and [E, N] their worth by the tokens' rank."""
    worth_of_copies = np.where(has_copy[:, :, None], worth, -1.0)
    best = worth_of_copies.max(axis=1)
    is_best = worth_of_copies == best[:, None, :]
    rank_pairs: FloatArray = (is_best * (rank_choices / is_best.sum(axis=1))[:, None, :]).sum(axis=2)
    return rank_pairs, best
