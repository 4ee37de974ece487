"""`moesaic place --topology`: the placement that is written, and the bytes on each link."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.policy.placement.solvers.test_link_aware import QUICK, pairs_of_topics
from tests.support.planted_profiles import noise

from moesaic.commands import cli
from moesaic.core.placement import Placement
from moesaic.policy.placement.solvers import link_aware

TWO_HOSTS = """
[links]
latency_us = 100
gb_per_s = 1
inside_latency_us = 5
inside_gb_per_s = 10
[[hosts]]
name = "a"
ranks = [0, 1]
[[hosts]]
name = "b"
ranks = [2, 3]
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges in few steps. They have tests of their own."""
    monkeypatch.setattr(link_aware, "AnnealingSearch", lambda: QUICK)


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    file = tmp_path / "profile.npz"
    found, _ = pairs_of_topics(1)
    replace(found, hidden=16).save(file)
    return file


def place(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["place", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_priced_links_carry_fewer_bytes(
    profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, out = tmp_path / "hosts.toml", tmp_path / "placement.json"
    hosts.write_text(TWO_HOSTS)
    common = [profile_file, "--ranks", 4, "--solver", "vanilla", "--share", 0.5, "--topology", hosts]
    found: dict[str, Any] = json.loads(place(capsys, *common, "--output-file", out, "--json"))
    links = found["solvers"][0]["links"]
    between = next(one for one in links["links"] if one["hosts"] == ["a", "b"])
    assert links["unit"] == "bytes"
    assert between["after"] < 0.7 * between["before"]
    assert links["seconds_after"] < links["seconds_before"]
    placement = Placement.from_json(out.read_text())
    assert placement.servers == (0, 1, 2, 3)
    text = place(capsys, *common, "--output-file", out)
    assert "a - b" in text
    assert "a row once per host" in text


def test_one_host_changes_nothing(
    profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(TWO_HOSTS.partition("[[hosts]]")[0] + '[[hosts]]\nname = "a"\nranks = [0, 1]\n')
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    common = [profile_file, "--ranks", 2, "--solver", "speculative", "--share", 0.5]
    place(capsys, *common, "--output-file", files[0])
    place(capsys, *common, "--output-file", files[1], "--topology", hosts)
    one, other = (Placement.from_json(file.read_text()) for file in files)
    assert one.experts_by_layer == other.experts_by_layer


def test_ranks_without_a_host_are_refused(
    profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(TWO_HOSTS)
    arguments = [profile_file, "--ranks", 3, "--compare", "--topology", hosts]
    assert cli.main(["place", *map(str, arguments)]) == 2
    assert "servers (or ranks): got [0, 1, 2, 3]; allowed: each of 0 to 2" in capsys.readouterr().err


def test_loads_alone_know_no_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, hosts = tmp_path / "loads.npz", tmp_path / "hosts.toml"
    hosts.write_text(TWO_HOSTS)
    replace(pairs_of_topics(1)[0], token_ids=False).save(file)
    arguments = [file, "--ranks", 4, "--topology", hosts, "--output-file", tmp_path / "out.json"]
    assert cli.main(["place", *map(str, arguments)]) == 2
    assert "--topology" in capsys.readouterr().err


@pytest.mark.slow
def test_every_solver_is_priced(
    profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(TWO_HOSTS)
    for name in ("eplb", "sem-moe", "moetuner"):
        out = tmp_path / f"{name}.json"
        common = [profile_file, "--ranks", 4, "--solver", name, "--share", 0.5, "--topology", hosts]
        found = json.loads(place(capsys, *common, "--output-file", out, "--json"))
        for solver in found["solvers"]:
            assert solver["links"]["seconds_after"] <= solver["links"]["seconds_before"]


def test_workers_of_one_host_get_cheap_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both workers and two of four servers are on host a. Some experts are chosen much more than others."""
    profile_file = tmp_path / "profile.npz"
    replace(noise(4, 8, 3, 2, requests=40), hidden=16).save(profile_file)
    hosts, out = tmp_path / "hosts.toml", tmp_path / "out.json"
    hosts.write_text(
        TWO_HOSTS.replace("ranks = [0, 1]", "workers = [0, 1]\nservers = [0, 1]").replace("ranks", "servers")
    )
    common = [profile_file, "--ranks", 4, "--solver", "vanilla", "--share", 0.5, "--topology", hosts]
    found = json.loads(place(capsys, *common, "--output-file", out, "--json"))
    links = found["solvers"][0]["links"]
    assert {tuple(one["hosts"]) for one in links["links"]} == {("a", "a"), ("a", "b")}
    assert links["seconds_after"] < 0.95 * links["seconds_before"]
    assert "no worker has a server of its own" in place(capsys, *common, "--output-file", out)
