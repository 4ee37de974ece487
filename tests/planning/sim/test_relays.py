"""Rows that cross the link between two hosts once, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import pairs, relayed_servers, small_scenario
from tests.support.relayed_servers import FarHost

from moesaic.config import RelayUse
from moesaic.experts import wire
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.figures import Figures

Hosts = Callable[..., str]
ROW = 4 * small_scenario.HIDDEN
SCHEDULES: dict[str, dict[str, Any]] = {
    "lockstep": {"kind": "lockstep"},
    "in halves": {"kind": "lockstep", "inflight_batches": 2},
    "barrier": {"kind": "barrier"},
    "async": {"kind": "async", "run_rows": 0},
}
FAULTS = ("none", "dies", "vanishes", "freezes")


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    """A file of two hosts: the workers and some servers on one, and the other servers on the other one."""

    def write(near: int, far: int, gb_per_s: float = 0.001) -> str:
        links = {"latency_us": 100, "gb_per_s": gb_per_s, "inside_latency_us": 5, "inside_gb_per_s": 1}
        names = [
            {"name": "a", "workers": [0, 1], "servers": list(range(near))},
            {"name": "b", "servers": list(range(near, near + far))},
        ]
        file = tmp_path / "hosts.json"
        file.write_text(json.dumps({"links": links, "hosts": names}))
        return str(file)

    return write


def far_bytes(figures: Figures) -> int:
    return sum(link.size for ends in figures.host_links.values() for link in ends.values())


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("relay", ["off", "always"])
@pytest.mark.parametrize("rows", [2, 7])
def test_the_bytes_of_real_relays(
    rows: int, relay: RelayUse, sums: bool, hosts: Hosts, tmp_path: Path
) -> None:
    """The same request over real connections, whose messages have headers beside the rows."""
    real = FarHost(tmp_path, relay=relay)
    real.meet()
    handle, _ = real.submit(rows, sums)
    ids = real.client._submissions[handle.number].experts.reshape(rows, -1)
    real.answer(handle)
    stats, width = real.client.stats(), relayed_servers.HIDDEN
    parts = 3 if relay == "always" else 0
    headers = wire.size(0, stats.pairs, width, sums, parts) + (stats.calls - 1) * wire.size(0, 0, width, sums)
    real.close()

    found = SimulatedCluster(
        small_scenario.scenario(
            workers={"count": 1},
            servers={"count": 3},
            links={"topology": hosts(0, 3)},
            schedule={"relay": relay, "combine": "partial" if sums else "exact"},
        ),
        replace(small_scenario.MODEL, hidden=width, experts=relayed_servers.EXPERTS, top_k=ids.shape[1]),
    )
    experts = found.workers[0].executor.experts
    found.fleet.begin([experts])
    found.timeline.run(0.1)
    number = experts.submit(0, ids.astype(np.int64))
    found.timeline.run(1.0)
    experts.progress()
    assert found.links is not None and experts.is_complete(number)
    assert sum(size for size, _ in found.links.measure_traffic().values()) == stats.far_bytes - headers
    assert (experts.calls, experts.pairs) == (stats.calls, stats.pairs) == (1 if parts else 3, 4 * rows)


@pytest.mark.slow
@pytest.mark.parametrize(("sums", "saved"), [(False, 0.196), (True, 0.434)])
def test_uniform_routing_saves_what_the_formula_says(sums: bool, saved: float, hosts: Hosts) -> None:
    """Top-4 on 2 x 4 servers, as `benchmarks/relays.py` has it."""
    found = {}
    for relay in ("off", "always"):
        cluster = small_scenario.cluster(
            servers={"count": 8},
            links={"topology": hosts(4, 4, gb_per_s=1.0)},
            routing={"experts": 256, "top_k": 4},
            schedule={"relay": relay, "combine": "partial" if sums else "exact"},
            workload={"kind": "closed", "clients": 32, "prompt": 1, "answer": 12},
            duration=0.5,
        )
        figures = cluster.run()
        found[relay] = far_bytes(figures) / (sum(figures.expert_load) / 4) / ROW
        sent = [
            figures.link_bytes[f"server {one}"].get(f"server {two}", 0) for one in (4, 5) for two in (6, 7)
        ]
        assert all(sent) == any(sent) == (relay == "always"), "a relay passes on what its neighbours need"
    far = 4 * (1 - (1 - 1 / 8) ** 4)
    assert found["off"] == pytest.approx(far + (far if sums else 2), rel=0.02)
    assert 1 - found["always"] / found["off"] == pytest.approx(saved, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "schedule", "combine"),
    pairs.params(FAULTS, SCHEDULES, ("exact", "partial"), fast=[("vanishes", "lockstep", "partial")]),
)
def test_every_request_is_answered_whatever_becomes_of_a_relay(
    kind: str, schedule: str, combine: str, hosts: Hosts
) -> None:
    found = small_scenario.cluster(
        duration=4.0,
        servers={"count": 4},
        placement={"min_replicas": 2},
        links={"topology": hosts(0, 4)},
        schedule=SCHEDULES[schedule] | {"relay": "always", "combine": combine},
        workload={"kind": "closed", "clients": 6, "requests": 12, "prompt": [2, 9], "answer": [4, 8]},
        faults=[] if kind == "none" else [{"at": 0.2, "server": 1, "kind": kind, "back": 0.9}],
    )
    figures = found.run()
    assert figures.completed == 12 and figures.link_bytes["server 0"]["server 2"] > 0
    if kind != "dies":  # else it depends on the moment
        assert (figures.resent_pairs > 0) == (kind != "none")
    assert not any(worker.executor.experts.is_waiting for worker in found.workers)


@pytest.mark.parametrize(("gb_per_s", "like"), [(0.001, "always"), (10.0, "off")])
def test_auto_decides_by_the_link(gb_per_s: float, like: str, hosts: Hosts) -> None:
    found = {}
    for relay in ("auto", "off", "always"):
        cluster = small_scenario.cluster(
            workers={"count": 1},
            servers={"count": 4},
            links={"topology": hosts(0, 4, gb_per_s)},
            workload={"kind": "closed", "clients": 16, "prompt": 1, "answer": 5, "requests": 16},
            schedule={"relay": relay},
        )
        found[relay] = far_bytes(cluster.run())
    assert found["auto"] == found[like] and found["always"] < found["off"]
