"""The parts of a run, the most important ones first."""

from __future__ import annotations

from scripts.gpu import identity, kernels, served, speed, suite
from scripts.gpu.plan import Part, several

PARTS: dict[str, Part] = {
    "identity": Part(120, 60, identity.cases, identity.run, several, fresh=False),
    "kernels": Part(95, 60, kernels.cases, kernels.run, fresh=False),
    "speed": Part(125, 75, speed.cases, speed.run),
    "tests": Part(75, suite.EACH, suite.cases, suite.run),
    "larger than GPU memory": Part(70, 45, served.larger, served.run),
    "processes": Part(55, 30, served.processes, served.run),
    "several GPUs": Part(35, 25, served.several_gpus, served.run),
}
"""Their seconds together are less than ten minutes."""
