"""MoETuner (arXiv 2502.06643): balances each layer's experts by load, then maps clusters to ranks by
traffic.

There are two integer programs. HiGHS solves the first one here, in place of Gurobi:

 1. For each layer alone: every expert is in one cluster, and all clusters have equal size. The sum over the
    clusters of |load - mean| is minimal. The printed form omits the size. It uses no affinity between
    experts.
 2. Each layer's clusters are mapped one to one onto ranks. A link is a pair of different ranks in adjacent
    layers. The largest number of choices that move over one link is minimal. All links count as equal.

Gaps are relative to the objective, and the lower bound of a deviation is 0 or close to it. Program 1
therefore adds the layer's load to the objective, so that a gap of 2.5 % (the paper's) is 2.5 % of the load.
All ranks are alike. A constraint tells the solver so: the heaviest expert is on rank 0, the next one on 0
or 1, and so on.

In program 2 all links are alike, so what moves between two layers depends only on their relative numbering.
Solving one layer after another is therefore optimal for all. Each step is a bottleneck assignment, which
bisection and the Hungarian method solve exactly. Among equal solutions the one with the fewest moves
between ranks is taken.

A search ends after a number of nodes, which is the same on every machine. A limit in seconds is the last
resort. If the search has no answer then, or a worse one than packing by load, packing's answer is taken.
`notes` names the layers with loads that were not proved to be within the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.eplb import pack_by_load
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SolverLimits:
    """The limits of the search for one program."""

    gap: float = 0.025
    """Gap relative to the best possible value. The default is the paper's."""
    nodes: int = 2000
    """Maximum number of nodes of the branch-and-bound tree."""
    seconds: float = 30.0
    """Maximum seconds. The paper gives none. Only a machine that is very slow for its layers reaches this
    limit."""


def solve(
    profile: Profile,
    ranks: int,
    seed: int = 0,
    progress: Progress | None = None,
    limits: SolverLimits | None = None,
) -> Coclusters:
    """Solve both programs. Nothing is random, so `seed` is unused.

    Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    room = experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.layers)
    limits = limits or SolverLimits()
    clusters = np.zeros((layers, profile.num_experts), dtype=np.int64)
    unproven_layers = []
    for layer, load in enumerate(profile.loads):
        clusters[layer], is_proven = balance_clusters(load, room, limits)
        if not is_proven:
            unproven_layers.append(profile.layers[layer])
        if progress is not None:
            progress(layer + 1, layers)
    numbers = map_clusters(traffic(profile.transitions, clusters, ranks))
    experts = np.take_along_axis(numbers, clusters, axis=1)
    return replace(label_tokens(profile, experts.astype(np.int16)), notes=_notes(unproven_layers, limits))


def _notes(layers: list[int], limits: SolverLimits) -> tuple[str, ...]:
    if not layers:
        return ()
    layer_names = ", ".join(map(str, layers))
    return (
        (
            f"moetuner: limits passed before loads were shown to be within {limits.gap:.1%} "
            f"in layers {layer_names}"
        ),
    )


# ---- program 1: experts into clusters


def balance_clusters(load: IntArray, room: IntArray, limits: SolverLimits) -> tuple[IntArray, bool]:
    """Clusters [E] with the least deviation from the mean load, and whether they are proved to be within
    the gap.

    HiGHS stops at the gap, and may find nothing within its limits. So the answer is packing by load if that
    is better. load: [E]. room: [R] number of experts of each cluster.

    Example: loads 5 4 3 2 into two clusters of two -> 5 and 2, 4 and 3.
    """
    experts, ranks = len(load), len(room)
    simple = pack_by_load(load, room).astype(np.int64)
    if ranks in (1, experts) or not load.any():
        return simple, True
    share = load / load.sum()
    result = milp(
        np.concatenate([np.zeros(experts * ranks), np.ones(ranks), [1.0]]),
        integrality=np.concatenate([np.ones(experts * ranks), np.zeros(ranks + 1)]),
        bounds=_bounds(share, ranks, alike=bool((room == room[0]).all())),
        constraints=_constraints(share, room),
        options={"mip_rel_gap": limits.gap, "node_limit": limits.nodes, "time_limit": limits.seconds},
    )
    if result.x is None:
        return simple, False
    clusters = result.x[: experts * ranks].reshape(experts, ranks).argmax(axis=1).astype(np.int64)
    better = deviation(load, clusters, ranks) < deviation(load, simple, ranks)
    return clusters if better else simple, result.status == 0


def deviation(load: IntArray, clusters: IntArray, ranks: int) -> float:
    """Sum over the clusters of |load - mean|."""
    cluster_loads = np.bincount(clusters, weights=load, minlength=ranks)
    return float(np.abs(cluster_loads - cluster_loads.mean()).sum())


def _bounds(share: FloatArray, ranks: int, alike: bool) -> Bounds:
    """Bounds of the variables: x [E, R], the deviations [R] and the constant 1.

    If all ranks are `alike`, the i-th heaviest expert is on ranks 0 to i.
    """
    most = np.ones((len(share), ranks))
    if alike:
        order = np.argsort(-share, kind="stable")[:ranks]
        most[order] = np.tril(np.ones((len(order), ranks)))
    high = np.concatenate([most.ravel(), np.full(ranks, np.inf), [1.0]])
    return Bounds(np.concatenate([np.zeros(most.size + ranks), [1.0]]), high)


def _constraints(share: FloatArray, room: IntArray) -> list[LinearConstraint]:
    """Constraints: each expert is in one cluster, clusters are full, and deviation >= +-(load - mean)."""
    experts, ranks = len(share), len(room)
    one = hstack([kron(eye_array(experts), np.ones((1, ranks))), csr_array((experts, ranks + 1))])
    full = hstack([kron(np.ones((1, experts)), eye_array(ranks)), csr_array((ranks, ranks + 1))])
    carried = kron(share[None, :], eye_array(ranks))
    nothing = csr_array((ranks, 1))
    above = hstack([carried, -eye_array(ranks), nothing])
    below = hstack([carried, eye_array(ranks), nothing])
    return [
        LinearConstraint(vstack([one, full]), *[np.concatenate([np.ones(experts), room])] * 2),
        LinearConstraint(above, -np.inf, 1 / ranks),
        LinearConstraint(below, 1 / ranks, np.inf),
    ]


# ---- program 2: clusters onto ranks


def traffic(transitions: IntArray, clusters: IntArray, ranks: int) -> FloatArray:
    """[layers - 1, R, R] share of choices that move from each cluster to each cluster of the next layer."""
    held = np.eye(ranks)[clusters]
    found = np.einsum("lec,lef,lfd->lcd", held[:-1], transitions.astype(np.float64), held[1:], optimize=True)
    shares: FloatArray = found / np.maximum(found.sum(axis=(1, 2), keepdims=True), 1.0)
    return shares


def map_clusters(traffic: FloatArray) -> IntArray:
    """The rank [layers, R] of each cluster.

    In layer 0, cluster i is on rank i. traffic: [layers - 1, R, R].

    Example: all choices move from clusters 0, 1 to clusters 1, 0 of the next layer -> [[0, 1], [1, 0]].
    """
    numbers = np.tile(np.arange(traffic.shape[1]), (len(traffic) + 1, 1))
    for layer, step in enumerate(traffic):
        numbers[layer + 1] = bottleneck(*_costs(step[np.argsort(numbers[layer])]))
    return numbers


def _costs(moves: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Costs [R, R] of each (cluster, rank): the most choices that come from one other rank, and all that
    do.

    moves: [R, R] from the ranks of one layer to the clusters of the next.
    """
    ranks = np.arange(len(moves))
    others = np.tile(moves.T[:, None, :], (1, len(moves), 1))
    others[:, ranks, ranks] = 0.0
    return others.max(axis=2), others.sum(axis=2)


def bottleneck(worst: FloatArray, total: FloatArray) -> IntArray:
    """Assign each row a column [R]: with the least maximum of `worst`, then the least sum of `total`, both
    [R, R].

    Example: most [[3, 1], [2, 4]] -> columns 1, 0 with maximum 2.
    """
    values = np.unique(worst)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        row, column = linear_sum_assignment(worst > values[middle])
        if (worst > values[middle])[row, column].any():
            low = middle + 1
        else:
            high = middle
    forbidden = total.sum() + 1.0
    columns = linear_sum_assignment(np.where(worst > values[low], forbidden, total))[1]
    return np.asarray(columns, dtype=np.int64)
