"""Solvers that find which tokens and experts belong together. Each has a file, and all have one signature."""

from __future__ import annotations

from moesaic.policy.placement.solvers import (
    annealing,
    eplb,
    kmeans,
    metis,
    moetuner,
    sem_moe,
    speculative,
    vanilla,
)
from moesaic.policy.placement.solvers.solver import Progress, Solver

__all__ = ["SOLVERS", "Progress", "Solver"]

SOLVERS: dict[str, Solver] = {
    "vanilla": vanilla.solve,
    "eplb": eplb.solve,
    "kmeans": kmeans.solve,
    "metis": metis.solve,
    "moetuner": moetuner.solve,
    "speculative": speculative.solve,
    "sem-moe": sem_moe.solve,
    "ours": annealing.solve,
}
"""The solvers by their names on the command line."""
