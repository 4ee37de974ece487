"""Hosts and links: the file, its errors, and what it says about ways and prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.core import topology
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel

TEXT = """
[links]
latency_us = 100.0
gb_per_s = 1.25
inside_latency_us = 5.0
inside_gb_per_s = 20.0
[[hosts]]
name = "a"
ranks = [0, 1]
[[hosts]]
name = "b"
workers = [2]
servers = [2, 3]
[[hosts]]
name = "c"
servers = [4]
[[between]]
hosts = ["b", "c"]
latency_us = 10
gb_per_s = 12.5
"""
TABLES: dict[str, Any] = {
    "links": {"latency_us": 100.0, "gb_per_s": 1.25, "inside_latency_us": 5.0, "inside_gb_per_s": 20.0},
    "hosts": [
        {"name": "a", "ranks": [0, 1]},
        {"name": "b", "workers": [2], "servers": [2, 3]},
        {"name": "c", "servers": [4]},
    ],
    "between": [{"hosts": ["b", "c"], "latency_us": 10, "gb_per_s": 12.5}],
}


def test_toml_and_json_are_read_alike(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "hosts.toml", tmp_path / "hosts.json"
    toml.write_text(TEXT)
    as_json.write_text(json.dumps(TABLES))
    assert topology.read(toml) == topology.read(as_json) == topology.parse_tables(TABLES, "here")


def test_links_between_and_inside_of_hosts() -> None:
    found = topology.parse_tables(TABLES, "here")
    assert found.link("a", "a") == LinkModel(1e-6 * 5.0, 20e9)
    assert found.link("a", "c") == LinkModel(1e-6 * 100.0, 1.25e9)
    assert found.link("b", "c") == found.link("c", "b") == LinkModel(1e-6 * 10, 12.5e9)


def test_the_way_from_a_worker_to_a_server() -> None:
    found = topology.parse_tables(TABLES, "here")
    assert found.way(2, 3).on_one_host
    assert found.way(2, 3).link == found.intra_host_link
    assert not found.way(2, 0).on_one_host
    assert found.way(7, 1) == found.way(0, 1), "a worker that no host names is on the first one"


def test_prices_are_seconds_of_a_byte() -> None:
    tables = {**TABLES, "hosts": [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2]}], "between": []}
    found = topology.parse_tables(tables, "here")
    found.check_ranks(3)
    expected = np.array([[0, 0.05, 0.8], [0.05, 0, 0.8], [0.8, 0.8, 0]]) * 1e-9
    assert np.allclose(found.prices(3), expected)
    assert found.has_ranks(3)
    assert found.worker_places().tolist() == found.server_places(3).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": []}, "unknown host; allowed: links, hosts, between"),
        ({"links": {"latency_us": 1}}, "links.inside_latency_us: got None; allowed: a number of at least 0"),
        ({"links": {**TABLES["links"], "gb_per_s": 0}}, "links.gb_per_s: got 0; allowed: a number above 0"),
        ({"links": {**TABLES["links"], "mtu": 9}}, "unknown links.mtu"),
        ({"hosts": []}, "hosts: got []; allowed: at least one table [[hosts]]"),
        ({"hosts": {"name": "a"}}, "hosts: got {'name': 'a'}; allowed: tables [[hosts]]"),
        ({"hosts": ["a"]}, "hosts.0: got 'a'; allowed: a table with name, ranks, workers, servers"),
        ({"hosts": [{"ranks": [0]}]}, "hosts.0.name: got None; allowed: the name of the host"),
        ({"hosts": [{"name": "a", "ranks": [-1]}]}, "hosts.0.ranks: got [-1]; allowed: a list of numbers"),
        (
            {"hosts": [{"name": "a"}, {"name": "a"}], "between": []},
            "hosts: name: got 'a'; allowed: each once",
        ),
        (
            {"hosts": [{"name": "a", "ranks": [0], "servers": [0]}], "between": []},
            "hosts: servers (or ranks): got 0; allowed: each once",
        ),
        (
            {"between": [{"hosts": ["a", "z"], "latency_us": 1, "gb_per_s": 1}]},
            "between.0.hosts: got ['a', 'z']; allowed: two of the hosts a, b, c",
        ),
        (
            {"between": TABLES["between"] * 2},
            "between.1.hosts: got ['b', 'c']; allowed: each pair of hosts once",
        ),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        topology.parse_tables({**TABLES, **change}, "hosts.toml")
    assert message in str(raised.value)
    assert "--topology: hosts.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file to read"):
        topology.read(tmp_path / "none.json")
    for name in ("bad.toml", "bad.json"):
        (tmp_path / name).write_text("{")
        with pytest.raises(ConfigError, match="is not a (TOML|JSON) file"):
            topology.read(tmp_path / name)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="an object"):
        topology.read(tmp_path / "list.json")


def test_prices_of_workers_that_are_no_ranks() -> None:
    hosts = [{"name": "a", "workers": [3], "servers": [0]}, {"name": "b", "servers": [1]}]
    found = topology.parse_tables({**TABLES, "hosts": hosts, "between": []}, "here")
    found.check_ranks(2)
    assert not found.has_ranks(2)
    assert found.workers == (3,)
    assert np.allclose(found.prices(2), np.array([[0.05, 0.8]]) * 1e-9), "no server is its own"


def test_ranks_need_a_host_each() -> None:
    found = topology.parse_tables(TABLES, "here")
    with pytest.raises(ConfigError, match=r"servers \(or ranks\): got \[0, .* 4\]; allowed: each of 0 to 1"):
        found.check_ranks(2)
    idle = {**TABLES, "hosts": [{"name": "a", "servers": [0]}], "between": []}
    with pytest.raises(ConfigError, match=r"workers \(or ranks\): got \[\]; allowed: 1 or more"):
        topology.parse_tables(idle, "here").check_ranks(1)
