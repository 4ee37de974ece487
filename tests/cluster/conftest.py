"""Attention workers start quickly in all tests of clusters; a cluster that servers can join."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_workers import Forking
from tests.support.hosts import Hosts, missing


@pytest.fixture(scope="module", autouse=True)
def quick(quick_workers: None) -> None:
    """Processes start as forks in every file."""


@pytest.fixture
def door(tmp_path: Path) -> dict[str, Any]:
    """Settings of a cluster that expert servers can join."""
    return {
        "cluster_address": "tcp:127.0.0.1:0",
        "cluster_secret_file": str(tmp_path / "secret"),
        "expert_servers": 1,
        "rebalance_interval": 0.0,
    }


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that all hosts of `hosts` have."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def running_hosts(shared: Path) -> Iterator[Hosts]:
    """Three hosts. This thread has the network of the first one, and so have workers that are forked here."""
    if missing():
        pytest.skip(missing())
    forking = Forking()
    with Hosts(3, [shared]) as made, made[0].entered(), forking.quick():
        forking.start()
        yield made
    forking.end()


@pytest.fixture
def hosts(running_hosts: Hosts) -> Iterator[Hosts]:
    """The same hosts. After each test those without this thread boot again."""
    yield running_hosts
    for number in range(1, len(running_hosts)):
        running_hosts[number].kill()
        running_hosts[number].boot()
