"""Packs experts by load alone, as DeepSeek EPLB does without redundant experts: a baseline without
affinity.

The heaviest expert comes first. Each goes to the lightest rank with a free slot. A rank's number means
nothing across layers.
"""

from __future__ import annotations

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile, SmallArray
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.packing import Layer, pack
from moesaic.policy.placement.solvers.solver import Progress, experts_per_rank
from moesaic.policy.placement.solvers.tokens import label_tokens


def solve(profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None) -> Coclusters:
    """Pack each layer's experts. Example: loads 9 5 4 1 on 2 ranks -> experts 0 3 | 1 2."""
    room = experts_per_rank(profile.num_experts, ranks)
    layers = len(profile.layers)
    experts = np.empty((layers, profile.num_experts), dtype=np.int16)
    for layer, loads in enumerate(profile.loads):
        experts[layer] = pack_by_load(loads, room)
        if progress is not None:
            progress(layer + 1, layers)
    return label_tokens(profile, experts)


def pack_by_load(loads: IntArray, room: IntArray) -> SmallArray:
    """[E] the rank of each expert. loads: [E]. room: [ranks] slots of each rank, sum(room) == E."""
    layer = Layer(
        load_per_copy=loads.astype(np.float64),
        count=np.ones(len(loads), dtype=np.int64),
        room=room,
        capacity=np.ones(len(room)),
    )
    has_copy = pack(layer, np.zeros((len(loads), len(room)), dtype=np.bool_))
    ranks: SmallArray = has_copy.argmax(axis=1).astype(np.int16)
    return ranks
