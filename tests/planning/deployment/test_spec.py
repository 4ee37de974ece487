from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel
from moesaic.planning.deployment import spec

FILE = """
[links]
inside_latency_us = 2.0
inside_gb_per_s = 300.0
latency_us = 8.0
gb_per_s = 25.0
[[machines]]
hosts = 2
devices = 4
device = "h100"
price_per_hour = 12.0
[[machines]]
device = "l4"
"""
CURVES = """
source = "measured"
attention = { points_ms = [[8, 1.5]] }
experts = { points_ms = [[8, 1]] }
link = { latency_us = 1, gb_per_s = 1 }
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE, encoding="utf-8")
    found = spec.load(str(path))
    first, second = found.pools
    assert (first.name, first.hosts, first.devices_per_host, first.devices) == ("h100", 2, 4, 8)
    assert (second.name, second.hosts, second.devices_per_host) == ("l4", 1, 1)
    assert first.intra_host_link == LinkModel(2e-6, 300e9) and found.inter_host_link == LinkModel(8e-6, 25e9)
    assert first.price_per_hour == 12 and second.price_per_hour is None and not found.has_prices
    assert first.on_gpu and found.assumptions == ()
    assert found.describe() == "8 x h100 on 2 hosts or 1 x l4 on 1 host"


def test_the_short_form_and_what_it_assumes() -> None:
    found = spec.load("16xH100, 2hosts, price=24.5")
    [pool] = found.pools
    assert (pool.hosts, pool.devices_per_host, pool.price_per_hour) == (2, 8, 24.5) and found.has_prices
    assert (
        pool.intra_host_link.bandwidth == 450e9
        and found.inter_host_link.bandwidth == spec.INTER_HOST_BANDWIDTH
    )
    assert found.assumptions == (
        "Assumed: a h100 sends 450 GB/s inside of its host (links.inside_gb_per_s).",
        "Assumed: a device sends 12.5 GB/s to other hosts (links.gb_per_s).",
    )
    assert spec.load("1xl4").assumptions == ()


def test_measured_curves_stand_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "curves.toml").write_text(CURVES, encoding="utf-8")
    found = spec.parse({"machines": [{"device": "t4", "curves": "curves.toml"}]}, tmp_path)
    assert found.pools[0].curves is not None and found.pools[0].curves.source == "measured"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("eight", "--cluster: got 'eight'; allowed: a .toml file, or DEVICESxMACHINE"),
        ("8xh100,3hosts", "--cluster: got '8xh100,3hosts'; allowed: as many devices on each host"),
        ("8xv100", "--cluster: machines.0.device: got 'v100'; allowed: t4, l4"),
        ("no.toml", "--cluster: got 'no.toml'; allowed: a file to read (No such file"),
    ],
)
def test_wrong_short_forms(given: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec.load(given)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("machines = 3", "machines: got 3; allowed: at least one table [[machines]]"),
        ("rooms = 3", "rooms: got 3; allowed: only these tables: machines, links"),
        ("[[machines]]", "machines.0.device: it is missing; allowed: t4"),
        ("[[machines]]\ndevice = 't4'\nhosts = 0", "machines.0.hosts: got 0; allowed: an integer of at"),
        ("[[machines]]\ndevice = 't4'\ncurves = 'x.toml'", "machines.0.curves: got '"),
        ("[links]\ngb_per_s = 0\n[[machines]]\ndevice = 't4'", "links.gb_per_s: got 0; allowed: a number"),
        ("= 3", "cluster.toml: not a TOML file"),
    ],
)
def test_wrong_files(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        spec.load(str(path))
    assert str(error.value).startswith("--cluster: ") and expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1
