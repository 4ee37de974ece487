"""A host with half of the expert servers is killed: with two copies of each expert nobody waits for it.

The copies of an expert are on different hosts, so those that are left have all experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, After, joined_cluster

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.slow]
WORK = workload(6, 64)
SETTINGS: dict[str, Any] = {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2}


@pytest.mark.parametrize("redundant", pairs.some([0, 3], [0]))
def test_a_host_dies_and_every_expert_has_a_holder_at_once(
    redundant: int, hosts: Hosts, shared: Path
) -> None:
    steady = {"redundant_experts": redundant, "rebalance_interval": 0.0}
    with joined_cluster(hosts, shared, **SETTINGS, **steady) as joined:
        supervisor = joined.served.supervisor
        joined.bring(hosts[1], [SERVER, SERVER])
        report, placement = supervisor.report(), supervisor.placement
        there = next(host for host in report.hosts if host.name)
        assert there.processes == ["expert server 2", "expert server 3"]
        assert placement is not None and placement.servers == (0, 1, 2, 3)
        assert [layer.one_host for layer in report.replicas] == [0] * len(placement.layers)
        assert placement.orphans(excluded_servers={2, 3}) == placement.orphans(excluded_servers={0, 1}) == []

        away = After(100, hosts[1].kill)
        fewest: list[int] = []

        def disturb(tokens: int) -> None:
            away(tokens)
            now = supervisor.report()
            fewest.append(min(layer.least for layer in now.replicas))
            assert not any(layer.missing for layer in now.replicas), "an expert has no holder"

        expected = alone(*WORK)
        assert joined.answers(*WORK, disturb) == expected and away.done
        joined.until(2)
        assert joined.numbers(SERVER) == {0, 1} and fewest[0] == 2
        assert all(one.incarnation == 1 for one in supervisor.status()), "nothing was restarted"
        assert joined.answers(*WORK) == expected


def test_a_host_with_too_much_of_the_capacity_is_told(
    hosts: Hosts, shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with joined_cluster(hosts, shared, **SETTINGS, rebalance_interval=0.0) as joined:
        joined.bring(hosts[1], [SERVER])
        supervisor = joined.served.supervisor
        left = sum(layer.one_host for layer in supervisor.report().replicas)
        assert left > 0, "a third of the slots cannot have a copy of each expert"
        joined.served.until(lambda: "experts have all of their copies on one host" in caplog.text)
        assert f"--min-replicas: {left} experts" in caplog.text
        joined.bring(hosts[1], [SERVER])
        assert sum(layer.one_host for layer in supervisor.report().replicas) == 0
