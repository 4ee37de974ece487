"""The common loop of solvers that look at each layer alone.

Each layer has its own random seed. At the end the clusters of all layers are numbered alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.align import align
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens

Report = Callable[[int], None]
"""A callback that is called with the number of parts of a layer that are done."""


def no_report(part: int) -> None:
    """The `Report` of a layer whose progress nobody asks for."""


def solve_layers(
    profile: Profile,
    ranks: int,
    seed: int,
    progress: Progress | None,
    place: Callable[[Counts, np.random.Generator, Report], IntArray],
    parts: int = 1,
) -> Coclusters:
    """Solve each layer with `place` and number the clusters of all layers alike.

    place: returns the ranks [E] of one layer's experts, and reports its parts but the last. parts: number
    of them in a layer, for the progress. Raises ConfigError unless `ranks` is 1 to the number of experts.
    """
    experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.counts)
    experts = np.zeros((layers, profile.num_experts), dtype=np.int64)

    def report(layer: int, part: int) -> None:
        if progress is not None:
            progress(layer * parts + part, layers * parts)

    for layer, counts in enumerate(profile.counts):
        experts[layer] = place(counts, np.random.default_rng((seed, layer)), partial(report, layer))
        report(layer, parts)
    return label_tokens(profile, align(profile, experts, ranks))
