"""Expert servers of another host that are reached by one-sided writes. No token is different.

There is no RDMA here, so UCX writes through TCP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.transport.nixl_link import INSTALL, available
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Answer
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import PREFILL, SERVER, After, joined_cluster

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not available(), reason=INSTALL),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
WORK = workload(6, 64)
BY_NIXL: dict[str, Any] = {"transport": "nixl", "rebalance_interval": 0.0, "attention_workers": 1}


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*WORK)


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def linked(pid: int) -> bool:
    """Whether a process has NIXL's library in its memory."""
    return "nixl" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_tokens_are_those_of_one_process(
    schedule: str, hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    with joined_cluster(hosts, shared, expert_servers=1, schedule=schedule, **BY_NIXL) as joined:
        joined.bring(hosts[1], [SERVER])
        assert joined.answers(*WORK) == expected
        assert linked(joined.served.pid("attention worker 0"))


def test_the_servers_host_goes(hosts: Hosts, shared: Path, expected: list[Answer]) -> None:
    with joined_cluster(hosts, shared, expert_servers=1, **BY_NIXL) as joined:
        joined.bring(hosts[1], [SERVER])
        away = After(100, hosts[1].kill)
        assert joined.answers(*WORK, away) == expected and away.done
        joined.until(1)
        assert joined.answers(*WORK) == expected


def test_a_prefill_worker_of_another_host_sends_its_kv(
    hosts: Hosts, shared: Path, expected: list[Answer]
) -> None:
    shape: dict[str, Any] = {"expert_servers": 1, "prefill_workers": 1}
    with joined_cluster(hosts, shared, **shape, **BY_NIXL) as joined:
        joined.bring(hosts[1], [PREFILL])
        assert joined.answers(*WORK) == expected
        assert linked(joined.served.pid("attention worker 0"))
