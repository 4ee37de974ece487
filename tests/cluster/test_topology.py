"""A cluster whose links are stated: tokens stay those of one process, and near servers are asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster import publishing
from moesaic.cluster.links import ASSUMED_LINK, LOCAL_LINK, Links
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.publishing import Publisher
from moesaic.commands.processes import as_lines
from moesaic.config import ClusterConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel
from moesaic.core.placement import Placement
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Cluster, cluster

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
        self.servers = [Member(Role.SERVER, number) for number in range(servers)]

    @property
    def all_members(self) -> list[Member]:
        return self.workers + self.servers

    @property
    def servers_of_launcher(self) -> list[Member]:
        return [member for member in self.servers if not member.is_external]

    def links(self, file: Path | None = None, ranks: int | None = None) -> Links:
        config = ClusterConfig(
            attention_workers=1 if ranks else len(self.workers),
            expert_servers=0 if ranks else len(self.servers),
            data_parallel_size=ranks,
            enable_expert_parallel=ranks is not None,
            topology=None if file is None else str(file),
        )
        return Links(self, config)  # type: ignore[arg-type]

    def joins(self, role: Role, host_id: str, address: str) -> Member:
        """Another process, which joins from another host."""
        alike = self.workers if role is Role.WORKER else self.servers
        member = Member(role, len(alike), is_external=True, host=address, host_id=host_id)
        alike.append(member)
        return member


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.toml"
    file.write_text(HOSTS)
    return file


def near(links: Links, client: Member) -> dict[int, bool]:
    return {server: way.on_one_host for server, way in links.ways(client).items()}


def test_the_ways_of_each_worker(hosts: Path) -> None:
    members = Processes(2, 3)
    found = members.links(hosts)
    assert near(found, members.workers[0]) == {0: True, 1: False, 2: False}
    assert near(found, members.workers[1]) == {0: False, 1: True, 2: True}
    prefill = Member(Role.PREFILL, 0)
    assert near(found, prefill) == near(found, members.workers[0]), "it is where moesaic serve runs"


def test_no_ways_where_all_processes_are_on_one_host(hosts: Path) -> None:
    members = Processes(1, 1)
    assert members.links(hosts).ways(members.workers[0]) == {}
    assert members.links().ways(members.workers[0]) == {}


def test_the_worth_of_servers(hosts: Path) -> None:
    found = Processes(2, 3).links(hosts)
    assert found.worth(0, range(3)).tolist() == pytest.approx([0.9, 0.0, 0.0])
    assert found.worth(1, range(3)).tolist() == pytest.approx([0.0, 0.9, 0.9])
    assert found.worth(7, range(3)).tolist() == [0.0, 0.0, 0.0], "a worker that is gone"
    assert found.worth(1, [2, 9]).tolist() == pytest.approx([0.9, 0.0]), "a server that is gone"


def test_on_one_host_only_the_own_ranks_server_counts() -> None:
    found = Processes(3, 3).links(ranks=3)
    for worker in range(3):
        assert found.worth(worker, range(3)).tolist() == [float(rank == worker) for rank in range(3)]


def test_worth_and_prices_follow_who_joins_and_what_is_measured() -> None:
    members = Processes(1, 1)
    found = members.links()
    assert found.worth(0, [0]).tolist() == [0.0], "all links are alike"
    assert found.prices(members.workers, [0]) == ()
    members.joins(Role.SERVER, "boot:1", "10.0.0.1")
    assert found.worth(0, [0, 1]).tolist() == pytest.approx(
        [1 - ASSUMED_LINK.bandwidth / LOCAL_LINK.bandwidth, 0.0]
    )
    found.record_link("boot:1", LinkModel(1e-4, LOCAL_LINK.bandwidth / 2))
    assert found.worth(0, [0, 1]).tolist() == pytest.approx([0.5, 0.0])
    assert found.worth(0, [1, 0]).tolist() == pytest.approx([0.0, 0.5])
    [prices] = found.prices(members.workers, [0, 1])
    assert prices == pytest.approx((1 / LOCAL_LINK.bandwidth, 2 / LOCAL_LINK.bandwidth))


def test_links_of_hosts_that_joined() -> None:
    """Two processes of one host, one of another host, and one of this host over its own address."""
    members = Processes(1, 1)
    found = members.links()
    members.joins(Role.SERVER, "boot:1", "10.0.0.1")
    members.joins(Role.SERVER, "boot:2", "10.0.0.2")
    members.joins(Role.SERVER, "", "127.0.0.1")
    there = members.joins(Role.WORKER, "boot:1", "10.0.0.1")
    fast, slow = LinkModel(1e-5, 4e9), LinkModel(2e-4, 1e9)
    found.record_link("boot:1", fast)
    found.record_link("boot:2", slow)
    assert near(found, members.workers[0]) == {0: True, 1: False, 2: False, 3: True}
    assert near(found, there) == {0: False, 1: True, 2: False, 3: False}
    assert found.ways(members.workers[0])[1].link == fast
    assert found.ways(there)[0].link == fast
    assert found.ways(there)[2].link == LinkModel(1e-5 + 2e-4, 1e9), "over the host of moesaic serve"
    assert [(host.name, host.processes) for host in found.hosts()] == [
        ("", ["attention worker 0", "expert server 0", "expert server 3"]),
        ("10.0.0.1", ["attention worker 1", "expert server 1"]),
        ("10.0.0.2", ["expert server 2"]),
    ]
    assert [(link.one, link.other, link.bytes_per_second, link.source) for link in found.links()] == [
        ("", "10.0.0.1", 4e9, "measured"),
        ("", "10.0.0.2", 1e9, "measured"),
        ("10.0.0.1", "10.0.0.2", 1e9, "assumed"),
    ]


def test_hosts_of_one_address_have_names_of_their_own() -> None:
    members = Processes(1, 1)
    found = members.links()
    for host in ("boot:1", "boot:2"):
        members.joins(Role.SERVER, host, "10.0.0.1")
    assert [host.name for host in found.hosts()] == ["", "10.0.0.1", "10.0.0.1 2"]
    assert {link.source for link in found.links()} == {"assumed"}


def test_people_see_hosts_and_links() -> None:
    members = Processes(1, 1)
    found = members.links()
    status: dict[str, Any] = {
        "processes": [],
        "replicas": [],
        "transport": None,
        "dispatch": "least-loaded",
        "placement_solve": None,
        "join_address": None,
        "paced": None,
        "watched": True,
    }

    def shown() -> str:
        tables = {"hosts": list(map(asdict, found.hosts())), "links": list(map(asdict, found.links()))}
        return "\n".join(as_lines(status | tables))

    assert "link" not in shown()
    members.joins(Role.SERVER, "boot:1", "10.0.0.1")
    found.record_link("boot:1", LinkModel(1e-4, 1.5e9))
    rows = [line.split() for line in shown().splitlines()]
    assert ["this", "host", "-", "10.0.0.1", "100", "µs", "1.5", "GB/s", "measured"] in rows
    assert ["10.0.0.1", "expert", "server", "1"] in rows


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


ELSEWHERE = """
import sys
from pathlib import Path
from moesaic.transport import host

host.this_host = lambda: "another boot:1"  # before any other module takes it from there
from moesaic.cluster.joining.options import JoinOptions
from moesaic.cluster.joining.server import serve_once
from moesaic.transport.secret import read_secret

secret = read_secret(Path(sys.argv[2]), "secret")
serve_once(JoinOptions(sys.argv[1], threads=1), secret, lambda model: None)
"""


@contextmanager
def far_server(served: Cluster, secret_file: str) -> Iterator[subprocess.Popen[bytes]]:
    """An expert server that joins and says that it is on another host."""
    address = served.supervisor.report().join_address
    assert address is not None
    command = [sys.executable, "-c", ELSEWHERE, address, secret_file]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("copies", [0, 24], ids=["each expert once", "all experts on both hosts"])
def test_a_host_that_joins_is_measured_and_asked_only_for_what_is_not_here(
    door: dict[str, Any], copies: int
) -> None:
    with (
        cluster(**door, redundant_experts=copies) as served,
        far_server(served, door["cluster_secret_file"]) as far_one,
    ):
        served.until(lambda: len(served.supervisor.report().hosts) == 2 or far_one.poll() is not None)
        served.until(lambda: served.supervisor.report().change is None)
        served.connected()
        report = served.supervisor.report()
        assert report.hosts[1].processes == ["expert server 1"]
        [link] = report.links
        assert (link.one, link.other, link.source) == ("", "127.0.0.1", "measured")
        assert link.bytes_per_second > 0
        before = report.counters.far_bytes
        served.submit(*workload(8, 24))
        assert served.finish() == alone(*workload(8, 24))
        served.until(lambda: served.stats.experts.pairs > 0)
        far = served.supervisor.report().counters.far_bytes - before
        assert (far == 0) == bool(copies)


def test_the_host_of_each_server(hosts: Path) -> None:
    assert Processes(2, 3).links(hosts).server_hosts() == {0: "a", 1: "b", 2: "b"}
    members = Processes(1, 1)
    found = members.links()
    members.joins(Role.SERVER, "boot:7", "10.0.0.2")
    assert found.server_hosts() == {0: "", 1: "boot:7"}


def test_servers_are_told_of_their_neighbours(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of host b, once, and again when one of them has another process."""
    members = Processes(2, 3)
    links, told = members.links(hosts), list[tuple[int, list[int]]]()

    def send(member: Member, message: object) -> None:
        if isinstance(message, messages.Neighbours):
            told.append((member.number, [entry.server for entry in message.servers]))

    monkeypatch.setattr(publishing, "_send", send)
    publisher = Publisher(members, b"s" * 32, links)  # type: ignore[arg-type]
    members.clients = []  # type: ignore[attr-defined]
    for member in members.servers:
        member.stage = Stage.SERVING
    publisher.serve(Placement(0, 3, {0: {0: [0], 1: [1], 2: [2]}}))
    assert told == [(1, [2]), (2, [1])]
    publisher.publish()
    assert len(told) == 2
    members.servers[2].incarnation += 1
    publisher.publish()
    assert told[2:] == [(1, [2]), (2, [1])]
    members.servers[2].stage = Stage.STARTING
    publisher.publish()
    assert told[4:] == [(1, [])]
