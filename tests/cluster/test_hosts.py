"""Expert servers on other hosts, which are killed, cut off and slowed down at work. No token is different."""

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
from tests.support.joined_cluster import SERVER, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
COUNT, TOKENS = 6, 64
STEADY: dict[str, Any] = {"rebalance_interval": 0.0}


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
    """The answers to the workload, which is sent now."""
    before = len(served.running.answers)
    served.submit(*workload(COUNT, TOKENS))
    return served.finish(disturb)[before:]


SCHEDULES = ("lockstep", "async", "barrier")


@pytest.mark.parametrize(("schedule", "replicas"), pairs.params(SCHEDULES, (1, 2)))
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_the_host_of_half_of_the_servers_goes(
    fault: str, schedule: str, replicas: int, hosts: Hosts, folder: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"schedule": schedule, "min_replicas": replicas, **STEADY}
    with joined_cluster(hosts, folder, attention_workers=2, expert_servers=2, **shape) as joined:
        for _ in range(2):
            joined.join(hosts[1])
        joined.until(4)
        away = After(100, hosts[1].kill if fault == "kill" else hosts[1].cut)
        assert answers(joined.served, away) == expected
        joined.until(2)
        assert joined.numbers(SERVER) == {0, 1}
        assert answers(joined.served) == expected
