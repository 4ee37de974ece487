"""The common loop of solvers that look at each layer alone: different seeds, then one numbering for all
layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.solver import Progress, rooms
from moesaic.policy.placement.solvers.tokens import labelled


def each_alone(
    profile: Profile,
    ranks: int,
    seed: int,
    progress: Progress | None,
    place: Callable[[Counts, np.random.Generator], IntArray],
) -> Coclusters:
    """place: ranks [E] of one layer's experts. Raises ConfigError where `ranks` is not in 1 .. experts."""
    rooms(profile.num_experts, ranks)
    layers = len(profile.counts)
    found = np.zeros((layers, profile.num_experts), dtype=np.int64)
    for layer, counts in enumerate(profile.counts):
        found[layer] = place(counts, np.random.default_rng((seed, layer)))
        if progress is not None:
            progress(layer + 1, layers)
    return labelled(profile, align(profile, found, ranks))
