"""Solvers that find which tokens and experts belong together. Each has a file, and all have one signature."""

from __future__ import annotations

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Profile
from moesaic.policy.placement.solvers import (
    annealing,
    eplb,
    kmeans,
    metis,
    sem_moe,
    speculative,
    vanilla,
)
from moesaic.policy.placement.solvers.solver import Progress, Solver

__all__ = ["SOLVERS", "Progress", "Solver"]


def _moetuner(profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None) -> Coclusters:
    """MoETuner is imported when it is chosen: SciPy takes half a second of the start of a server."""
    from moesaic.policy.placement.solvers import moetuner

    return moetuner.solve(profile, ranks, seed, progress)


SOLVERS: dict[str, Solver] = {
    "vanilla": vanilla.solve,
    "eplb": eplb.solve,
    "kmeans": kmeans.solve,
    "metis": metis.solve,
    "moetuner": _moetuner,
    "speculative": speculative.solve,
    "sem-moe": sem_moe.solve,
    "ours": annealing.solve,
}
"""The solvers by their names on the command line."""
