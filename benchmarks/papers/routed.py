"""Local activation rates of our solvers, for the papers' figures about placement.

The routing is made up (routings.py): 64 experts top-6 as DeepSeek-V2-Lite has, or 128 top-8 as Qwen3-30B-A3B.
Its concentration is fitted to the papers' Table 1. A constant of it is fitted so that METIS or balanced
k-means reach a local activation rate of 0.47 on 8 ranks at token level. So rates on 8 ranks are no
prediction of ours; what solvers gain over each other, other numbers of ranks and other domains are. Solvers
see 20 % of the requests, as in the papers, and are measured on the others.
"""

from __future__ import annotations

from functools import lru_cache

import figures
import numpy as np
import routings
from placements import trial

from moesaic.core.profile import Profile, Routes
from moesaic.policy.placement import holdout
from moesaic.policy.placement.locality import homes_of, measure
from moesaic.policy.placement.solvers import SOLVERS

SHARE = 0.2
EXPERTS = {"deepseek-v2-lite": 64, "qwen3-30b-a3b": 128}
"""Model -> experts of its made-up routing."""


@lru_cache(maxsize=4)
def routing(experts: int, layers: int = 4, requests: int = 800, seed: int = 0) -> Profile:
    """The routing of all requests."""
    shape = next(shape for shape in routings.SHAPES if shape.experts == experts)
    return routings.generate(shape, layers, requests, seed)


@lru_cache(maxsize=32)
def solved(solver: str, experts: int, ranks: int) -> figures.Row:
    """A solver's rates, as `placements.trial`, and "unshuffled": the rate where tokens are on any rank."""
    learned, others = holdout.split(routing(experts), SHARE, 0)
    found = trial(solver, learned, others, ranks, 0)
    return found | {"unshuffled": unshuffled(solver, learned, others, ranks)}


def unshuffled(solver: str, learned: Profile, others: Routes, ranks: int) -> float:
    """The local activation rate of a placement if tokens are on the ranks in turn."""
    clusters = SOLVERS["vanilla" if solver != "moetuner" else solver](learned, ranks, 0, None)
    own = (np.arange(len(others.tokens)) % ranks).astype(np.int16)
    return measure(others.experts, homes_of(clusters), own, ranks).rate
