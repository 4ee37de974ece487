"""Places experts in consecutive ranges, as engines do without a placement file. Nothing is solved.

Tokens go to the rank with most of their choices, so that only the experts' placement differs from other
solvers.
"""

from __future__ import annotations

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens


def solve(profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None) -> Coclusters:
    """Place the experts of every layer in ranges.

    Example: 4 experts, 2 ranks -> experts 0 1 | 2 3 in every layer.
    """
    row = np.repeat(np.arange(ranks), experts_per_rank(profile.num_experts, ranks))
    layers = len(profile.layers)
    if progress is not None:
        progress(layers, layers)
    return label_tokens(profile, np.tile(row, (layers, 1)).astype(np.int16))
