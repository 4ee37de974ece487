"""A search of deployments for a small model on made-up devices, which takes less than a second."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from moesaic.core import paced_devices
from moesaic.planning.deployment import demand, spec
from moesaic.planning.deployment.search import Search
from tests.support.small_scenario import DEVICES, MODEL

WORK: dict[str, Any] = {"rate": 60.0, "prompt": [3, 9], "answer": [4, 12]}


def machines(devices: int = 3, hosts: int = 1) -> spec.ClusterSpec:
    """Hosts with made-up devices, at 3.6 an hour each."""
    found = spec.load(f"{devices}xh100,{hosts}hosts,price=3.6")
    curves = paced_devices.parse_tables(DEVICES, "made up")
    pools = tuple(replace(pool, curves=curves) for pool in found.pools)
    return replace(found, pools=pools)


def search(
    seconds: float = 1e9, tick: float = 0.0, slo: str | None = "ttft=1s,itl=60ms", **more: Any
) -> Search:
    """A search. tick: seconds by which the clock goes on each time it is read."""
    ticks = count()
    requests = demand.parse({"workload": more.pop("workload", WORK)}, Path())
    return Search(
        more.pop("model", MODEL),
        more.pop("spec", machines()),
        requests,
        demand.parse_objectives(slo),
        seconds,
        seed=more.pop("seed", 1),
        clock=lambda: tick * next(ticks),
        **more,
    )
