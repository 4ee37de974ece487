"""--transport: how attention workers reach the expert servers of their host, chosen, refused, told."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster import host_transport as module
from moesaic.cluster.host_transport import host_transport
from moesaic.commands.processes import as_lines
from moesaic.config import ClusterConfig
from moesaic.core.errors import ConfigError
from tests.support.cluster_driver import cluster

SHARED = "memfd:moesaic-calls"
"""In the map of a process's memory."""


def test_auto_is_shared_memory() -> None:
    assert [host_transport(one) for one in ("auto", "shm", "socket")] == ["shm", "shm", "socket"]


def test_without_the_compiled_module_auto_is_a_socket_and_shm_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMPILED", "moesaic.transport.missing")
    assert [host_transport(one) for one in ("auto", "socket")] == ["socket", "socket"]
    with pytest.raises(ConfigError, match=r"--transport: got 'shm'; allowed: auto, socket \(.*missing\)"):
        host_transport("shm")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "tcp"}, "--transport: got 'tcp'; allowed: auto, shm, socket, nixl"),
        ({"transport": "nixl"}, "--transport: got 'nixl'; allowed: auto, .* without --cluster-address"),
        ({"transport": "socket", "expert_servers": 0}, "at least 1 with --transport"),
        (
            {"transport": "shm", "cluster_address": "tcp:h:1", "cluster_secret_file": "f"},
            "--transport: got 'shm'; allowed: auto, socket with --cluster-address",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**{"expert_servers": 1} | settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "shared", "way"), [("auto", True, "shared memory"), ("socket", False, "Unix sockets")]
)
def test_what_was_chosen_is_done_and_told(transport: str, shared: bool, way: str) -> None:
    with cluster(transport=transport) as served:
        served.until(lambda: all(server.stats.clients == 1 for server in served.supervisor.status()[1:]))
        memory = Path(f"/proc/{served.pid('attention worker 0')}/maps").read_text()
        assert (SHARED in memory) is shared
        lines = as_lines(asdict(served.supervisor.report()))
        assert f"attention workers reach the expert servers of this host by {way}" in lines


@pytest.mark.slow
def test_without_expert_servers_nothing_is_told() -> None:
    with cluster(attention_workers=2, expert_servers=0) as served:
        report = served.supervisor.report()
        assert report.transport is None
        assert not any("reach" in line for line in as_lines(asdict(report)))
