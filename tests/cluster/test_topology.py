"""A cluster whose links are stated: tokens stay those of one process, and near servers are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.links import Links
from moesaic.cluster.member import Member, Role
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import cluster

HOSTS = """
[links]
latency_us = 100
gb_per_s = 1
inside_latency_us = 5
inside_gb_per_s = 10
[[hosts]]
name = "a"
workers = [0]
servers = [0]
[[hosts]]
name = "b"
workers = [1]
servers = [1, 2]
"""


class Processes:
    """Members with these numbers, as `Links` sees them."""

    def __init__(self, workers: int, servers: int) -> None:
        self.workers = [Member(Role.WORKER, number) for number in range(workers)]
        self.servers = self.servers_here = [Member(Role.SERVER, number) for number in range(servers)]


def links(file: Path, workers: int, servers: int, **settings: Any) -> Links:
    config = ClusterConfig(attention_workers=workers, expert_servers=servers, topology=str(file), **settings)
    return Links(Processes(workers, servers), config)  # type: ignore[arg-type]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.toml"
    file.write_text(HOSTS)
    return file


def test_the_ways_of_each_worker(hosts: Path) -> None:
    found = links(hosts, 2, 3)
    near = [{s: way.near for s, way in found.ways(Member(Role.WORKER, w)).items()} for w in (0, 1)]
    assert near == [{0: True, 1: False, 2: False}, {0: False, 1: True, 2: True}]
    prefill = found.ways(Member(Role.PREFILL, 0))
    assert {s: way.near for s, way in prefill.items()} == near[0], "it is where moesaic serve runs"


def test_no_ways_where_all_processes_are_on_one_host(hosts: Path) -> None:
    assert links(hosts, 1, 1).ways(Member(Role.WORKER, 0)) == {}


def test_the_worth_of_servers(hosts: Path) -> None:
    found = links(hosts, 2, 3)
    assert found.worth(0).tolist() == pytest.approx([0.9, 0.0, 0.0])
    assert found.worth(1).tolist() == pytest.approx([0.0, 0.9, 0.9])
    assert found.worth(7).tolist() == [0.0, 0.0, 0.0]
    ranks = links(hosts, 2, 2, enable_expert_parallel=True, data_parallel_size=2)
    assert [ranks.worth(worker).tolist() for worker in (0, 1)] == [[1.0, 0.0], [0.0, 1.0]]


def test_a_wrong_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("[links]\n")
    with (
        pytest.raises(ConfigError, match="--topology: .*hosts.toml: "),
        cluster(topology=str(tmp_path / "hosts.toml")),
    ):
        pass
    with pytest.raises(ConfigError, match="at least 1 with --topology"):
        ClusterConfig(topology="hosts.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"schedule": "lockstep"}, id="lockstep"),
        pytest.param({"schedule": "async"}, id="async"),
        pytest.param({"schedule": "barrier"}, id="barrier", marks=pytest.mark.full),
    ],
)
def test_the_same_bits_by_near_replicas(hosts: Path, settings: dict[str, Any]) -> None:
    """Every expert is on every server. Host b's worker asks servers 1 and 2, and host a's asks server 0."""
    with cluster(
        attention_workers=2, expert_servers=3, min_replicas=3, topology=str(hosts), **settings
    ) as served:
        served.connected()
        served.submit(*workload(8, 24))
        assert served.finish() == alone(*workload(8, 24))
        served.until(lambda: bool(served.supervisor.worker_stats()))
        assert all(stats.experts.pairs for stats in served.supervisor.worker_stats().values())
        assert served.supervisor.report().counters.far_bytes == 0
