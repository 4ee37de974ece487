"""--transport: how attention workers reach the expert servers of their host, chosen, refused, told."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster import host_transport as module
from moesaic.cluster.host_transport import host_transport, transport_of
from moesaic.commands.processes import as_lines
from moesaic.config import ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
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


def on_gpus(**settings: Any) -> WorkerConfig:
    return replace(WorkerConfig(ModelConfig("demo", device="cuda")), **settings)


@pytest.mark.parametrize(
    ("cluster", "worker", "why"),
    [
        ({}, {"model": ModelConfig("demo")}, "--device auto: workers and expert servers need --device cuda"),
        ({}, {"model": ModelConfig("demo", device="cpu")}, "--device cpu: workers and expert servers need"),
        ({}, {"server_memory": 1 << 30}, "--fast-memory"),
        ({"paced": "devices.toml"}, {}, "--paced: modelled devices hold rows of the host"),
        (
            {},
            {"scheduler": SchedulerConfig(relay="always")},
            "--relay always: all processes are",
        ),
        (
            {"cluster_address": "tcp:h:1", "cluster_secret_file": "f"},
            {},
            "--cluster-address: all processes are on this host",
        ),
        (
            {"distributed_executor_backend": "ray"},
            {},
            "--distributed-executor-backend ray: all processes are on this host",
        ),
    ],
)
def test_rows_on_gpus_are_refused_where_they_cannot_stay(
    cluster: dict[str, Any], worker: dict[str, Any], why: str
) -> None:
    asked = ClusterConfig(expert_servers=1, transport="cuda_ipc", **cluster)
    with pytest.raises(ConfigError, match=f"^--transport: got 'cuda_ipc'; allowed: auto, shm, .* with {why}"):
        transport_of(asked, on_gpus(**worker))
    assert transport_of(replace(asked, transport="auto", **cluster), on_gpus(**worker)) == "shm"


def test_rows_on_gpus_need_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ClusterConfig(expert_servers=1, transport="cuda_ipc")
    assert transport_of(asked, on_gpus()) == "cuda_ipc"
    assert transport_of(replace(asked, tensor_parallel_size=2), on_gpus()) == "cuda_ipc"
    monkeypatch.setattr(module, "COMPILED", "moesaic.transport.missing")
    with pytest.raises(ConfigError, match="got 'cuda_ipc'; allowed: auto, socket .the compiled module"):
        transport_of(asked, on_gpus())


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
