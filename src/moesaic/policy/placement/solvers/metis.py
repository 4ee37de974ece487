"""Minimum k-cut of the co-activation graph by METIS, one of the baselines of Speculative MoE.

Each layer is solved alone. Experts are vertices. The weight of an edge is the expected number of tokens
that choose both its ends (`affinity`). METIS (Karypis and Kumar, 1998, through pymetis, the extra
`moesaic[metis]`) bisects recursively, which cuts less here than its k-way form. It keeps the sizes only
roughly. So experts then move from ranks that have too many to ranks with free slots. The expert that loses
least weight to its rank moves first. At the end clusters are numbered alike in all layers (`align`).
"""

from __future__ import annotations

import numpy as np

try:
    import pymetis
except ImportError:
    pymetis = None  # type: ignore[assignment]

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.affinity import FloatArray, coactivation
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens

HEAVIEST = 10_000
"""Maximum weight of an edge. METIS uses integers and adds them up in 32 bits."""
IMBALANCE = 1
"""Allowed imbalance of the sizes, in thousandths."""


def solve(profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None) -> Coclusters:
    """Partition each layer's experts. Raises ConfigError if pymetis is not installed."""
    if pymetis is None:
        raise ConfigError.field("--solver", "metis", "the others, or pip install 'moesaic[metis]' first")
    room = experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.layers)
    experts = np.empty((layers, profile.num_experts), dtype=np.int16)
    for layer, counts in enumerate(profile.counts):
        weights = coactivation(counts, profile.num_experts, profile.top_k)
        np.fill_diagonal(weights, 0.0)
        experts[layer] = fit_sizes(weights, _parts(weights, room, seed), room)
        if progress is not None:
            progress(layer + 1, layers)
    return label_tokens(profile, align(profile, experts, ranks))


def _parts(weights: FloatArray, room: IntArray, seed: int) -> IntArray:
    """[E] the part that METIS chooses for each expert. weights: [E, E], 0 on the diagonal."""
    scaled = np.rint(weights * (HEAVIEST / max(weights.max(), 1e-300))).astype(np.int64)
    if len(room) in (1, len(weights)) or not scaled.any():
        return np.repeat(np.arange(len(room)), room)
    ends = np.concatenate([[0], np.cumsum((scaled > 0).sum(axis=1))])
    graph = pymetis.CSRAdjacency(ends.tolist(), np.nonzero(scaled)[1].tolist())
    _, parts = pymetis.part_graph(
        len(room),
        adjacency=graph,
        eweights=scaled[scaled > 0].tolist(),
        tpwgts=(room / room.sum()).tolist(),
        recursive=True,
        options=pymetis.Options(ufactor=IMBALANCE, seed=seed),
    )
    return np.array(parts, dtype=np.int64)


def fit_sizes(weights: FloatArray, parts: IntArray, room: IntArray) -> SmallArray:
    """[E] `parts`, changed until rank r has room[r] experts.

    Example: weights between 0 and 1 and between 2 and 3, parts 0 0 0 1, room 2 2 -> 0 0 1 1.
    """
    parts = parts.copy()
    indices = np.arange(len(parts))
    while (surplus := np.bincount(parts, minlength=len(room)) - room).any():
        rank_weights = weights @ np.eye(len(room))[parts]
        gain = rank_weights - rank_weights[indices, parts][:, None]
        gain[np.ix_(surplus[parts] <= 0, indices[: len(room)])] = -np.inf
        gain[:, surplus >= 0] = -np.inf
        expert, rank = divmod(int(gain.argmax()), len(room))
        parts[expert] = rank
    return parts.astype(np.int16)
