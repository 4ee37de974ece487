"""Hosts and links in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_scenario import cluster, scenario

from moesaic.commands import cli
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel
from moesaic.planning.sim.device import Channel, Stream
from moesaic.planning.sim.timeline import Timeline

TWO_HOSTS: dict[str, Any] = {
    "links": {"latency_us": 500, "gb_per_s": 0.0005, "inside_latency_us": 100, "inside_gb_per_s": 0.001},
    "hosts": [
        {"name": "a", "workers": [0], "servers": [0]},
        {"name": "b", "workers": [1], "servers": [1]},
    ],
}


@pytest.fixture
def hosts(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        file = tmp_path / "hosts.json"
        file.write_text(json.dumps(TWO_HOSTS | changes))
        return str(file)

    return write


def test_devices_of_a_host_share_its_link() -> None:
    """Two devices send 100 bytes at 100 bytes/s each. On a shared link the second one waits."""
    timeline = Timeline()
    slow = Channel(timeline, LinkModel(0.5, 100.0))
    for shared, expected in ((False, [1.5, 1.5]), (True, [1.5, 2.5])):
        streams = [
            Stream(
                f"worker {number}",
                timeline,
                LinkModel(0.5, 100.0),
                channel=lambda one, other, shared=shared: slow if shared else None,
            )
            for number in range(2)
        ]
        assert [stream.send("server 0", 100, lambda: None) for stream in streams] == expected
        assert [stream.sent_bytes["server 0"] for stream in streams] == [100, 100]
    assert (slow.size, slow.busy) == (200, 2.0)


def test_one_host_is_the_same_as_no_topology(hosts: Callable[..., str]) -> None:
    one = hosts(hosts=[{"name": "a", "workers": [0, 1], "servers": [0, 1]}])
    plain, placed = cluster().run(), cluster(links={"topology": one}).run()
    assert placed.host_links == {}
    assert (placed.tokens, placed.link_bytes) == (plain.tokens, plain.link_bytes)


def test_bytes_between_hosts_are_those_of_the_devices(hosts: Callable[..., str]) -> None:
    found = cluster(links={"topology": hosts()}).run()
    sent = found.link_bytes
    assert found.host_links["a"]["b"].size == sent["worker 0"]["server 1"] + sent["server 0"]["worker 1"]
    assert found.host_links["b"]["a"].size == sent["worker 1"]["server 0"] + sent["server 1"]["worker 0"]
    assert 0 < found.host_links["a"]["b"].utilisation < 1


def test_with_copies_nothing_leaves_a_host(hosts: Callable[..., str]) -> None:
    copies = {"placement": {"min_replicas": 2}}
    assert cluster(**copies).run().link_bytes["worker 0"]["server 1"] > 0
    found = cluster(**copies, links={"topology": hosts()}).run()
    assert sum(link.size for ends in found.host_links.values() for link in ends.values()) == 0
    assert found.completed > 0


def test_a_slow_link_takes_longer(hosts: Callable[..., str]) -> None:
    found = [
        cluster(links={"topology": hosts(links=TWO_HOSTS["links"] | {"latency_us": latency})}).run()
        for latency in (500, 5000)
    ]
    assert found[1].itl.mean > found[0].itl.mean


def test_wrong_fields(hosts: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"links.gb_per_s: got 1.0; allowed: only without links.topology"):
        scenario(links={"topology": hosts(), "gb_per_s": 1})
    with pytest.raises(ConfigError, match=r"links.topology: .*none.json.*a file to read"):
        cluster(links={"topology": str(tmp_path / "none.json")})
    apart = hosts(hosts=[{"name": "a", "workers": [0, 1]}, {"name": "b", "servers": [0, 1]}])
    with pytest.raises(ConfigError, match="links.topology: host of server 0: got 'b'; allowed: 'a'"):
        cluster(links={"topology": apart}, servers={"count": 2, "beside_workers": True})


def test_the_flag_replaces_the_files_links(
    hosts: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(
        """
model = "demo"
duration = 1.0
devices = { source = "made up", attention = { points_ms = [[8, 1]] }, experts = { points_ms = [[8, 1]] }, \
link = { latency_us = 10, gb_per_s = 1 } }
links = { gb_per_s = 2 }
workers = { count = 2 }
servers = { count = 2 }
workload = { rate = 40, prompt = [3, 9], answer = [4, 12] }
"""
    )
    line = ["simulate", str(file), "--topology", hosts(links=TWO_HOSTS["links"] | {"gb_per_s": 1})]
    assert cli.main(line) == 0
    text = capsys.readouterr().out
    assert "Links between hosts" in text
    assert "a to b" in text
    assert cli.main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_links"]["b"]["a"]["size"] > 0
