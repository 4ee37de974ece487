"""Scenarios of a small cluster in virtual time, and the runs of them."""

from __future__ import annotations

from typing import Any

from moesaic.cost.sizes import GroupedQuery, ModelSizes
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.scenario import Scenario, parse

LAYERS, HIDDEN, EXPERTS, TOP_K = 4, 16, 8, 2
MODEL = ModelSizes("small", LAYERS, HIDDEN, 64, GroupedQuery(2, 1, 8), LAYERS, EXPERTS, TOP_K, 32)
DEVICES: dict[str, Any] = {
    "source": "made up",
    "attention": {"points_ms": [[8, 2.0], [16, 4.0]]},
    "experts": {"points_ms": [[8, 1.0], [16, 2.0]], "per_expert_ms": 0.25},
    "link": {"latency_us": 100.0, "gb_per_s": 0.001},
}


def scenario(**changes: Any) -> Scenario:
    """A scenario with two workers and two servers. changes: tables and fields, in place of these."""
    tables: dict[str, Any] = {
        "model": "small",
        "devices": DEVICES,
        "seed": 3,
        "duration": 2.0,
        "workers": {"count": 2, "max_num_seqs": 16, "max_model_len": 64},
        "servers": {"count": 2},
        "workload": {"kind": "poisson", "rate": 40.0, "prompt": [3, 9], "answer": [4, 12]},
    }
    return parse(tables | changes)


def cluster(**changes: Any) -> SimulatedCluster:
    """A cluster that has not run yet."""
    return SimulatedCluster(scenario(**changes), MODEL)
