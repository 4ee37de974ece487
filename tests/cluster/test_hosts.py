"""Processes of other hosts, which are killed, cut off and slowed down at work. No token is different.

`tests.support.hosts` makes the hosts. The cluster runs on the first one, and the others join it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import Answer
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, WORKER, After, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
WORK = workload(6, 64)
STEADY: dict[str, Any] = {"rebalance_interval": 0.0}
SCHEDULES = ("lockstep", "async", "barrier")
KILL, CUT = "kill", "cut"


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*WORK)


def act(hosts: Hosts, fault: str) -> Callable[[], None]:
    return hosts[1].kill if fault == KILL else hosts[1].cut


SERVERS_GO = list(itertools.product((KILL, CUT), SCHEDULES, (1, 2)))
NOW = [(KILL, "async", 2), (CUT, "lockstep", 1)]
"""They have each fault, with and without copies of the experts on the other host."""


@pytest.mark.parametrize(("fault", "schedule", "replicas"), pairs.some(SERVERS_GO, NOW))
def test_the_host_of_half_of_the_servers_goes(
    fault: str, schedule: str, replicas: int, hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"schedule": schedule, "min_replicas": replicas, **STEADY}
    with joined_cluster(hosts, shared, attention_workers=2, expert_servers=2, **shape) as joined:
        joined.bring(hosts[1], [SERVER, SERVER])
        away = After(100, act(hosts, fault))
        assert joined.answers(*WORK, away) == expected and away.done
        joined.until(2)
        assert joined.numbers(SERVER) == {0, 1}
        assert joined.answers(*WORK) == expected


@pytest.mark.slow
def test_servers_join_again_once_their_link_is_there(
    hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"min_replicas": 2, **STEADY}
    with joined_cluster(hosts, shared, attention_workers=1, expert_servers=2, **shape) as joined:
        joined.bring(hosts[1], [SERVER])
        assert joined.answers(*WORK, After(100, hosts[1].cut)) == expected
        joined.until(2)
        heal = After(100, hosts[1].heal)
        assert joined.answers(*WORK, heal) == expected and heal.done
        joined.until(3)
        assert joined.numbers(SERVER) == {0, 1, 3}
        assert joined.answers(*WORK) == expected
        assert joined.joined[0].poll() is None, joined.logs()


@pytest.mark.slow
def test_a_slow_link_that_loses_packets_costs_no_token(
    hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    with joined_cluster(hosts, shared, attention_workers=1, expert_servers=1, **STEADY) as joined:
        joined.bring(hosts[1], [SERVER])
        hosts[1].limit("40mbit")
        assert joined.answers(*WORK) == expected
        hosts[1].limit(None)
        hosts[1].disturb(delay=0.005, loss=0.005)
        assert joined.answers(*WORK) == expected


WORKERS_GO = [
    (fault, schedule, servers)
    for fault, schedule, servers in itertools.product((KILL, CUT), SCHEDULES, (0, 2))
    if servers or schedule == "lockstep"
]


@pytest.mark.parametrize(
    ("fault", "schedule", "servers"), pairs.some(WORKERS_GO, [(KILL, "async", 2), (CUT, "lockstep", 0)])
)
def test_an_attention_workers_host_goes(
    fault: str, schedule: str, servers: int, hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"schedule": schedule, "min_replicas": 2 if servers else 1, **STEADY}
    with joined_cluster(hosts, shared, attention_workers=1, expert_servers=servers, **shape) as joined:
        joined.bring(hosts[1], [WORKER])
        away = After(100, act(hosts, fault))
        assert joined.answers(*WORK, away) == expected and away.done
        joined.until(1, WORKER)
        if fault == CUT:
            hosts[1].heal()
            joined.until(2, WORKER)
            assert joined.numbers(WORKER) == {0, 2}
        assert joined.answers(*WORK) == expected
