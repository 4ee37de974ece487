"""--transport: how attention workers reach the expert servers of their host, chosen, refused, told."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from moesaic.cluster import host_transport as module
from moesaic.cluster.host_transport import choose_transport, host_transport
from moesaic.commands.processes import TRANSPORTS, as_lines
from moesaic.config import (
    ClusterConfig,
    HostTransport,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem import package as nvshmem_package
from moesaic.transport.listening import kind_of
from tests.support.cluster_driver import cluster

SHARED = "memfd:moesaic-calls"
"""In the map of a process's memory."""


def test_auto_is_shared_memory() -> None:
    assert [host_transport(one) for one in ("auto", "shm", "socket")] == ["shm", "shm", "socket"]


def test_without_the_compiled_module_auto_is_a_socket_and_shm_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMPILED_MODULE", "moesaic.transport.missing")
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
        choose_transport(asked, on_gpus(**worker))
    assert choose_transport(replace(asked, transport="auto", **cluster), on_gpus(**worker)) == "shm"


def test_rows_on_gpus_need_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ClusterConfig(expert_servers=1, transport="cuda_ipc")
    assert choose_transport(asked, on_gpus()) == "cuda_ipc"
    assert choose_transport(replace(asked, tensor_parallel_size=2), on_gpus()) == "cuda_ipc"
    monkeypatch.setattr(module, "COMPILED_MODULE", "moesaic.transport.missing")
    with pytest.raises(ConfigError, match="got 'cuda_ipc'; allowed: auto, socket .the compiled module"):
        choose_transport(asked, on_gpus())


def graphs(**settings: Any) -> WorkerConfig:
    model = ModelConfig("demo", device="cuda", kernels="triton", cudagraph_mode="full")
    return WorkerConfig(**{"model": model} | settings)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM's bindings are there, or a module that looks so."""
    monkeypatch.setattr(nvshmem_package, "MODULE", "json")


@pytest.mark.parametrize(
    ("cluster", "worker", "why"),
    [
        ({}, {"model": ModelConfig("m")}, "--device auto: workers and expert servers need --device cuda"),
        (
            {},
            {"model": ModelConfig("m", device="cuda")},
            "--cudagraph-mode piecewise: only graphs of whole steps use NVSHMEM",
        ),
        ({"paced": "devices.toml"}, {}, "--paced: modelled devices hold rows of the host"),
        (
            {"distributed_executor_backend": "ray"},
            {},
            "--distributed-executor-backend ray: no job of NVSHMEM is formed there",
        ),
        (
            {},
            {"scheduler": SchedulerConfig(relay="always")},
            "--relay always: a graph sends rows to each server itself",
        ),
    ],
)
def test_nvshmem_is_refused_where_no_graph_can_use_it(
    cluster: dict[str, Any], worker: dict[str, Any], why: str, installed: None
) -> None:
    asked = ClusterConfig(expert_servers=1, transport="nvshmem", **cluster)
    with pytest.raises(ConfigError, match=f"^--transport: got 'nvshmem'; allowed: auto, shm, .* with {why}$"):
        choose_transport(asked, graphs(**worker))


@pytest.mark.parametrize(
    "settings",
    [
        {"model": ModelConfig("m", device="cuda", cudagraph_mode="full")},
        {"server_memory": 1 << 30},
        {"parallel": ParallelConfig(2)},
        {"parallel": ParallelConfig(2, nnodes=2)},
    ],
)
def test_what_whole_steps_do_not_go_with_is_refused_before(settings: dict[str, Any]) -> None:
    """--kernels, --fast-memory, and ranks of one host and of several."""
    line = "^--(kernels|fast-memory|tensor-parallel-size): got .* with --cudagraph-mode full$"
    with pytest.raises(ConfigError, match=line):
        graphs(**settings)


def test_nvshmem_may_have_other_hosts_and_is_not_encrypted(
    installed: None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ClusterConfig(expert_servers=1, transport="nvshmem")
    door = {"cluster_address": "tcp:h:1", "cluster_secret_file": "f"}
    for one in (asked, replace(asked, **door), replace(asked, standby_for="tcp:g:1", **door)):
        assert choose_transport(one, graphs()) == "nvshmem"
        assert caplog.messages.pop().endswith("are not encrypted between hosts")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"transport": "shm", "nvshmem_pes": 3},
            "--transport: got 'shm'; allowed: nvshmem with --nvshmem-pes",
        ),
        ({"nvshmem_pes": 2}, "--nvshmem-pes: got 2; allowed: at least 3, --attention-workers and"),
        ({"nvshmem_pes": "4"}, "--nvshmem-pes: got '4'; allowed: at least 3"),
    ],
)
def test_a_job_of_another_number_of_processes(
    settings: dict[str, Any], message: str, installed: None
) -> None:
    asked = ClusterConfig(attention_workers=2, expert_servers=1, transport="nvshmem", nvshmem_pes=3)
    assert choose_transport(asked, graphs()) == "nvshmem"
    with pytest.raises(ConfigError, match=f"^{message}"):
        choose_transport(replace(asked, **settings), graphs())


def test_without_its_bindings_nvshmem_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_package, "MODULE", "moesaic.missing")
    with pytest.raises(ConfigError, match=r"got 'nvshmem'; .* \(nvshmem4py is not installed: pip install "):
        choose_transport(ClusterConfig(expert_servers=1, transport="nvshmem"), graphs())


def test_each_transport_has_a_name_for_people() -> None:
    assert TRANSPORTS.keys() == set(get_args(HostTransport))


def test_all_but_graphs_goes_as_without_nvshmem() -> None:
    addresses = "unix:@a", "tcp:10.0.0.2:80"
    assert [kind_of("nvshmem", one) for one in addresses] == [kind_of("shm", one) for one in addresses]


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
