"""Tokens and experts that belong together: one solver a file, one signature."""

from __future__ import annotations

from moesaic.policy.cocluster import eplb, kmeans, metis, moetuner, ours, sem_moe, speculative, vanilla
from moesaic.policy.cocluster.solver import Progress, Solver

__all__ = ["SOLVERS", "Progress", "Solver"]

SOLVERS: dict[str, Solver] = {
    "vanilla": vanilla.solve,
    "eplb": eplb.solve,
    "kmeans": kmeans.solve,
    "metis": metis.solve,
    "moetuner": moetuner.solve,
    "speculative": speculative.solve,
    "sem-moe": sem_moe.solve,
    "ours": ours.solve,
}
"""Name on the command line -> solver."""
