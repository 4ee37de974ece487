"""Balanced k-means on the experts' token-count vectors, one of the baselines of Speculative MoE.

Each layer is solved alone:

 - *Vectors.* An expert's vector says how often each token id chose it, with ids weighted as in `affinity`.
   It is scaled to length 1, so that hot experts are no further from the rest than cold ones. Only products
   of vectors are computed.
 - *Rounds.* Every round assigns all experts at once with the least sum of squared distances to the centres.
   Each centre gets exactly as many experts as its rank has slots (Malinen and Fränti, Balanced K-Means for
   Clustering, 2014).
 - *Starts.* The rounds start from several draws of k-means++. The result with the least sum is kept.

At the end clusters are numbered alike in all layers (`align`).
"""

from __future__ import annotations

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.affinity import FloatArray, coactivation
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.assignment import assign
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens

STARTS = 16
ROUNDS = 100
"""Maximum number of rounds from each start. In practice a few are enough."""


def solve(profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None) -> Coclusters:
    """Cluster each layer's experts, then number the clusters of all layers alike.

    Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    room = experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.layers)
    experts = np.empty((layers, profile.num_experts), dtype=np.int16)
    for layer, counts in enumerate(profile.counts):
        products = unit(coactivation(counts, profile.num_experts, profile.top_k))
        experts[layer] = cluster_vectors(products, room, np.random.default_rng((seed, layer)))
        if progress is not None:
            progress(layer + 1, layers)
    return label_tokens(profile, align(profile, experts, ranks))


def unit(products: FloatArray) -> FloatArray:
    """[E, E] products of the vectors after scaling them to length 1. A vector of length 0 stays.

    products: [E, E].
    """
    length = np.sqrt(np.diag(products))
    length = np.where(length > 0, length, 1.0)
    scaled: FloatArray = products / (length[:, None] * length)
    return scaled


def cluster_vectors(products: FloatArray, room: IntArray, rng: np.random.Generator) -> SmallArray:
    """[E] the cluster of each vector.

    products: [E, E] of the vectors. room: [R] size of each cluster, sum(room) == E. Example: vectors 1 0, 0
    1, 1 0, 0 1 and room 2 2 -> 0 1 0 1, or 1 0 1 0.
    """
    best, least_spread = np.zeros(len(products), dtype=np.int16), np.inf
    for _ in range(STARTS):
        clusters = _iterate(products, room, _spread(products, len(room), rng))
        spread = _spread_within(products, clusters, room)
        if spread < least_spread:
            best, least_spread = clusters, spread
    return best


def _spread(products: FloatArray, ranks: int, rng: np.random.Generator) -> list[int]:
    """Draw R different vectors as centres, each in proportion to its squared distance from the nearest
    earlier one."""
    square = np.diag(products)
    centres = [int(rng.integers(len(products)))]
    while len(centres) < ranks:
        distance = square[:, None] - 2 * products[:, centres] + square[centres]
        weight = distance.min(axis=1).clip(min=1e-9)
        weight[centres] = 0.0
        centres.append(int(rng.choice(len(products), p=weight / weight.sum())))
    return centres


def _iterate(products: FloatArray, room: IntArray, centres: list[int]) -> SmallArray:
    """Alternate between assigning vectors and computing means until nothing changes. Returns clusters [E].

    The lengths of vectors and centres add up to the same in all assignments, since sizes are fixed. So
    products are enough.
    """
    slots = np.repeat(np.arange(len(room)), room)
    similar = products[:, centres]
    clusters = np.full(len(products), -1)
    for _ in range(ROUNDS):
        new = slots[assign(similar[:, slots])[1]]
        if (new == clusters).all():
            break
        clusters = new
        similar = products @ (np.eye(len(room))[clusters] / room)
    return clusters.astype(np.int16)


def _spread_within(products: FloatArray, clusters: SmallArray, room: IntArray) -> float:
    """Sum of squared distances of the vectors to their centres."""
    member = np.eye(len(room))[clusters]
    similarity = (member * (products @ member)).sum(axis=0)
    return float(np.trace(products) - (similarity / room).sum())
