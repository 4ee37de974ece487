"""Processes of other hosts, which are killed, cut off and slowed down at work. No token is different.

`tests.support.hosts` makes the hosts. The cluster runs on the first one, and the others join it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support import forked_workers, pairs
from tests.support.cluster_driver import Answer, Cluster
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, WORKER, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
COUNT, TOKENS = 6, 64
STEADY: dict[str, Any] = {"rebalance_interval": 0.0}
SCHEDULES = ("lockstep", "async", "barrier")
KILL, CUT = "kill", "cut"


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[Hosts]:
    """Hosts whose first one has this process's network. Workers that are forked inside have it, too."""
    with Hosts(3, [folder]) as found, found[0].entered(), forked_workers.process() as forking:
        forking.start()
        yield found


@pytest.fixture
def hosts(made: Hosts) -> Iterator[Hosts]:
    yield made
    for number in range(1, len(made)):
        made[number].kill()
        made[number].boot()


class After:
    """Does something once when so many tokens are there."""

    def __init__(self, tokens: int, act: Callable[[], object]) -> None:
        self.tokens, self.act, self.done = tokens, act, False

    def __call__(self, tokens: int) -> None:
        if not self.done and tokens >= self.tokens:
            self.done = True
            self.act()


def answers(served: Cluster, disturb: Callable[[int], None] = lambda tokens: None) -> list[Answer]:
    """The answers to the workload, which is sent now. `disturb` gets the number of its tokens."""
    before, told = len(served.running.answers), served.running.tokens
    served.submit(*workload(COUNT, TOKENS))
    return served.finish(lambda tokens: disturb(tokens - told))[before:]


def act(hosts: Hosts, fault: str) -> Callable[[], None]:
    return hosts[1].kill if fault == KILL else hosts[1].cut


@pytest.mark.parametrize(
    ("fault", "schedule", "replicas"), pairs.params((KILL, CUT), SCHEDULES, (1, 2))
)  # fmt: skip
def test_the_host_of_half_of_the_servers_goes(
    fault: str, schedule: str, replicas: int, hosts: Hosts, folder: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"schedule": schedule, "min_replicas": replicas, **STEADY}
    with joined_cluster(hosts, folder, attention_workers=2, expert_servers=2, **shape) as joined:
        for _ in range(2):
            joined.join(hosts[1])
        joined.until(4)
        away = After(100, act(hosts, fault))
        assert answers(joined.served, away) == expected and away.done
        joined.until(2)
        assert joined.numbers(SERVER) == {0, 1}
        assert answers(joined.served) == expected


@pytest.mark.slow
def test_servers_join_again_once_their_link_is_there(
    hosts: Hosts, folder: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"min_replicas": 2, **STEADY}
    with joined_cluster(hosts, folder, attention_workers=1, expert_servers=2, **shape) as joined:
        process = joined.join(hosts[1])
        joined.until(3)
        assert answers(joined.served, After(100, hosts[1].cut)) == expected
        joined.until(2)
        heal = After(100, hosts[1].heal)
        assert answers(joined.served, heal) == expected and heal.done
        joined.until(3)
        assert joined.numbers(SERVER) == {0, 1, 3}
        assert answers(joined.served) == expected
        assert process.poll() is None, joined.logs()


@pytest.mark.slow
def test_a_slow_link_that_loses_packets_costs_no_token(
    hosts: Hosts, folder: Path, expected: list[Answer]
) -> None:
    with joined_cluster(hosts, folder, attention_workers=1, expert_servers=1, **STEADY) as joined:
        joined.join(hosts[1])
        joined.until(2)
        hosts[1].limit("40mbit")
        assert answers(joined.served) == expected
        hosts[1].limit(None)
        hosts[1].disturb(delay=0.01, loss=0.01)
        assert answers(joined.served) == expected


# ---- attention workers and prefill workers


@pytest.mark.parametrize(
    ("fault", "schedule", "servers"), pairs.params((KILL, CUT), SCHEDULES, (0, 2))
)  # fmt: skip
def test_an_attention_workers_host_goes(
    fault: str, schedule: str, servers: int, hosts: Hosts, folder: Path, expected: list[Answer]
) -> None:
    if not servers and schedule != "lockstep":
        pytest.skip("without expert servers there is one schedule")
    shape: dict[str, Any] = {"schedule": schedule, "min_replicas": 2 if servers else 1, **STEADY}
    with joined_cluster(hosts, folder, attention_workers=1, expert_servers=servers, **shape) as joined:
        joined.join(hosts[1], WORKER)
        joined.until(2, WORKER)
        away = After(100, act(hosts, fault))
        assert answers(joined.served, away) == expected and away.done
        joined.until(1, WORKER)
        if fault == CUT:
            hosts[1].heal()
            joined.until(2, WORKER)
            assert joined.numbers(WORKER) == {0, 2}
        assert answers(joined.served) == expected
