"""The common loop of solvers that look at each layer alone.

Each layer has its own random seed. At the end the clusters of all layers are numbered alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens


def solve_layers(
    profile: Profile,
    ranks: int,
    seed: int,
    progress: Progress | None,
    place: Callable[[Counts, np.random.Generator], IntArray],
) -> Coclusters:
    """Solve each layer with `place` and number the clusters of all layers alike.

    place: returns the ranks [E] of one layer's experts. Raises ConfigError unless `ranks` is 1 to the
    number of experts.
    """
    experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.counts)
    experts = np.zeros((layers, profile.num_experts), dtype=np.int64)
    for layer, counts in enumerate(profile.counts):
        experts[layer] = place(counts, np.random.default_rng((seed, layer)))
        if progress is not None:
            progress(layer + 1, layers)
    return label_tokens(profile, align(profile, experts, ranks))
