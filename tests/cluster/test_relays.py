"""Rows that several servers of another host need cross the link once. Tokens stay those of one process.

With `--topology` one machine is two hosts. In the other tests hosts are namespaces, and processes of the
other host are killed, frozen and cut off while requests run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import Answer, cluster
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, After, JoinedCluster, joined_cluster

TWO_HOSTS = """
[links]
latency_us = 100
gb_per_s = 1
inside_latency_us = 5
inside_gb_per_s = 10
[[hosts]]
name = "a"
workers = [0, 1]
[[hosts]]
name = "b"
servers = [0, 1, 2, 3]
"""
SHAPES = [
    ("lockstep", 1, "exact"),
    ("lockstep", 2, "exact"),
    ("lockstep", 2, "partial"),
    ("barrier", 1, "exact"),
    ("barrier", 1, "partial"),
    ("async", 1, "exact"),
    ("async", 1, "partial"),
    ("auto", 1, "exact"),
]
NOW = [("lockstep", 2, "partial")]
needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing())


def alike(found: list[Answer], expected: list[Answer], combine: str) -> bool:
    """Whether tokens are equal, and the log-probabilities too where nothing rounds differently."""
    tokens = [one for one, _ in found] == [one for one, _ in expected]
    return tokens and (combine == "partial" or found == expected)


@pytest.mark.parametrize(("schedule", "inflight", "combine"), pairs.some(SHAPES, NOW))
def test_fewer_bytes_and_the_same_tokens(schedule: str, inflight: int, combine: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(TWO_HOSTS)
    shape: dict[str, Any] = {"schedule": schedule, "inflight_batches": inflight, "combine": combine}
    shape |= {"attention_workers": 2, "expert_servers": 4, "topology": str(file), "rebalance_interval": 0.0}
    far = {}
    for relay in ("off", "always"):
        with cluster(relay=relay, **shape) as served:
            served.connected()
            for _ in range(2):  # the first time relays may not be connected yet
                before, told = served.stats.experts, len(served.running.answers)
                served.submit(*workload(8, 48))
                found = served.finish()[told:]
                assert alike(found, alone(*workload(8, 48)), combine) and not served.broken_off
            counted = served.stats.experts
            far[relay] = (counted.far_bytes - before.far_bytes) / (counted.pairs - before.pairs)
    assert far["always"] < (0.6 if combine == "partial" else 0.85) * far["off"]


KILL, FREEZE, CUT = "kill", "freeze", "cut"
FAULTS = pairs.cover((KILL, FREEZE, CUT), (0, 1, 2), SHAPES)
FAULTS_NOW = [case for case in FAULTS if case[0] == KILL and case[2][2] == "exact"][:1]


@needs_hosts
@pytest.mark.parametrize(("fault", "which", "shape"), pairs.some(FAULTS, FAULTS_NOW))
def test_a_server_of_the_other_host_goes(
    fault: str, which: int, shape: tuple[str, int, str], hosts: Hosts, shared: Path
) -> None:
    """Each of three servers of a host in turn. Each of them passes rows on for others, at some layers."""
    schedule, inflight, combine = shape
    work = workload(6, 64)
    settings: dict[str, Any] = {"schedule": schedule, "inflight_batches": inflight, "combine": combine}
    settings |= {"attention_workers": 1, "expert_servers": 2, "min_replicas": 2, "rebalance_interval": 0.0}
    with joined_cluster(hosts, shared, relay="always", **settings) as joined:
        joined.bring(hosts[1], [SERVER, SERVER, SERVER])
        assert alike(joined.answers(*work), alone(*work), combine)
        away = After(100, act(joined, hosts, fault, which))
        assert alike(joined.answers(*work, away), alone(*work), combine) and away.done
        joined.until(2 if fault == CUT else 4)
        assert alike(joined.answers(*work), alone(*work), combine)


def act(joined: JoinedCluster, hosts: Hosts, fault: str, which: int) -> Callable[[], None]:
    process = joined.joined[which]
    if fault == CUT:
        return hosts[1].cut
    return lambda: os.kill(process.pid, signal.SIGKILL if fault == KILL else signal.SIGSTOP)
