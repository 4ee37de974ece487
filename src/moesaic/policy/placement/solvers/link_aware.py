"""Fits any solver's clusters to links with different prices.

The solvers count a choice on another rank alike, wherever that rank is. This module starts from their
clusters and maximises worth (`link_prices`), which counts a choice by the link to its server:

 1. *Numbers.* Ranks are renumbered, so that clusters with choices of the same requests share a host. First
    two numbers are swapped in all layers, then in one layer at a time, as long as that gains. The value is
    that of align.py, with the overlap of two clusters counted by the worth between their ranks. Where links
    are alike, nothing changes.
 2. *Exchanges.* Each layer is annealed briefly and polished as in annealing.py, with worth in place of local
    choices. The busiest rank may carry as much as before, or as the cap of annealing.py allows.
 3. *Token ids* go to the rank where their choices are worth most.

Workers need not be ranks, such as attention workers of one host that ask servers of several hosts. Two ranks
are then as near as what both are worth for the same workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.link_prices import worth_of
from moesaic.policy.placement.solvers.align import EXACT, overlaps
from moesaic.policy.placement.solvers.annealing import (
    AnnealingSearch,
    Layer,
    anneal,
    dense,
    overload,
    polish,
    sample_rows,
)
from moesaic.policy.placement.solvers.solver import Progress
from moesaic.policy.placement.solvers.tokens import label_tokens

FloatArray = npt.NDArray[np.float64]


def solve_for_links(
    profile: Profile,
    clusters: Coclusters,
    prices: FloatArray,
    seed: int = 0,
    progress: Progress | None = None,
    search: AnnealingSearch | None = None,
) -> Coclusters:
    """Other clusters, whose choices take fewer seconds on the links. Equal arguments give equal clusters.

    prices: [W, R] seconds of a byte from each worker to each rank's server. Where worker i is rank i, the
    diagonal is 0.

    Example: ranks 0 and 1 share a host, and so do ranks 2 and 3. The tokens of clusters 0 and 2 also choose
    experts of each other. Then clusters 0 and 2 come onto one host.
    """
    worth, settings = worth_of(prices), search or AnnealingSearch()
    workers_are_ranks = prices.shape == (clusters.ranks, clusters.ranks) and not prices.diagonal().any()
    rank_worth = worth if workers_are_ranks else worth @ worth.T / len(prices)
    experts = renumber_clusters(profile, clusters.experts.astype(np.int64), rank_worth)
    layers = len(experts)
    for layer, counts in enumerate(profile.counts):
        rng = np.random.default_rng((seed, layer))
        experts[layer] = _exchange_experts(counts, experts[layer], worth, rng, settings)
        if progress is not None:
            progress(layer + 1, layers)
    return replace(
        label_tokens(profile, experts.astype(np.int16), worth if workers_are_ranks else None),
        notes=clusters.notes,
    )


def renumber_clusters(profile: Profile, experts: IntArray, worth: FloatArray) -> IntArray:
    """The ranks [layers, E] with other numbers, for which the value of `agreement` is higher or as high.

    worth: [R, R] between two ranks: what both are worth for the same workers.
    """
    layers, ranks = len(experts), len(worth)
    overlap, symmetric_worth = overlaps(profile, experts, ranks), (worth + worth.T) / 2
    numbers = np.tile(np.arange(ranks), (layers, 1))
    has_changed = True
    while has_changed:
        old_numbers = numbers.copy()
        numbers = _number_all_layers(overlap, numbers, symmetric_worth)[numbers]
        for layer in range(layers):
            numbers[layer] = _number_layer(overlap, numbers, layer, symmetric_worth)
        has_changed = bool((numbers != old_numbers).any())
    return np.take_along_axis(numbers, experts, axis=1)


def agreement(overlap: FloatArray, numbers: IntArray, worth: FloatArray) -> float:
    """Sum of the overlaps [layers, R, layers, R] of any two clusters, times the worth between their ranks.

    numbers: [layers, R] the rank of each cluster.
    """
    flat = numbers.ravel()
    return float((overlap.reshape(len(flat), -1) * worth[flat][:, flat]).sum())


def _number_all_layers(overlap: FloatArray, numbers: IntArray, worth: FloatArray) -> IntArray:
    """[R] the number that each rank should get in all layers."""
    ranks = len(worth)
    one_hot = np.eye(ranks)[numbers.ravel()]
    rank_overlap = one_hot.T @ overlap.reshape(len(one_hot), -1) @ one_hot
    return _swaps(np.arange(ranks), lambda new: float((rank_overlap * worth[new][:, new]).sum()))


def _number_layer(overlap: FloatArray, numbers: IntArray, layer: int, worth: FloatArray) -> IntArray:
    """[R] the numbers of a layer's clusters, given those of the other layers."""
    ranks = len(worth)
    other_layers = np.eye(ranks)[numbers]
    other_layers[layer] = 0.0
    gain = 2 * overlap[layer].reshape(ranks, -1) @ other_layers.reshape(-1, ranks) @ worth
    own_overlap, indices = overlap[layer, :, layer], np.arange(ranks)
    return _swaps(
        numbers[layer], lambda new: float(gain[indices, new].sum() + (own_overlap * worth[new][:, new]).sum())
    )


def _swaps(numbers: IntArray, value: Callable[[IntArray], float]) -> IntArray:
    """Swap two of the numbers [R] as long as that raises the value. Returns the changed numbers."""
    numbers, best, has_changed = numbers.copy(), value(numbers), True
    while has_changed:
        has_changed = False
        for one, other in combinations(range(len(numbers)), 2):
            numbers[[one, other]] = numbers[[other, one]]
            new_value = value(numbers)
            if new_value > best + EXACT:
                best, has_changed = new_value, True
            else:
                numbers[[one, other]] = numbers[[other, one]]
    return numbers


def _exchange_experts(
    counts: Counts, labels: IntArray, worth: FloatArray, rng: np.random.Generator, search: AnnealingSearch
) -> IntArray:
    """The ranks [E] of a layer's experts after exchanges that gain worth."""
    ranks = len(worth)
    if ranks == 1 or not len(counts.experts):
        return labels
    rows = dense(counts, len(labels))
    loads = rows.sum(axis=0, dtype=np.float64)
    brief = replace(
        search,
        spare=max(search.spare, overload(labels, loads, ranks)),
        hot=search.warm,
        steps=search.brief,
    )
    small = Layer.from_rows(sample_rows(rows, search.heads, search.sample, rng), loads, ranks, brief, worth)
    large = Layer.from_rows(
        sample_rows(rows, search.polish // 2, search.polish // 2, rng), loads, ranks, brief, worth
    )
    return polish(large, max(labels, anneal(small, labels, rng, brief), key=large.value))
