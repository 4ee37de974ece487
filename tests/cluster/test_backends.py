"""--distributed-executor-backend: where processes start, and what goes only with processes of this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.launch import launch
from moesaic.config import ClusterConfig, ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.trace.options import RecordConfig

RAY = {"distributed_executor_backend": "ray"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_executor_backend": "uni"}, "backend: got 'uni'; allowed: local, mp, ray"),
        (RAY | {"devices": "0,1"}, "--devices: got '0,1'; allowed: nothing with .* ray: Ray gives"),
        (RAY | {"paced": "f"}, "--paced: got 'f'; allowed: nothing with .* ray: its file is on this host"),
        (RAY | {"schedule_policy_file": "f"}, "--schedule-policy-file: got 'f'; allowed: nothing with"),
        (RAY | {"transport": "shm"}, "--transport: got 'shm'; allowed: auto, socket with .* ray"),
        (
            RAY | {"rebalance": "routing", "data_parallel_size": 2, "enable_expert_parallel": True},
            "--rebalance: got 'routing'; allowed: load with .* ray",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    servers = {} if "data_parallel_size" in settings else {"expert_servers": 1}
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**servers | settings)


@pytest.mark.parametrize(
    ("worker", "record", "message"),
    [
        ({"trace": "f"}, {}, "--trace: got 'f'; allowed: nothing with .* ray: its parts are files"),
        ({}, {"record_routing": "r.npz"}, "--record-routing: got 'r.npz'; allowed: nothing with"),
        ({"model": ModelConfig("demo", pin_threads=True)}, {}, "--pin-threads: got 'True'; allowed: nothing"),
    ],
)
def test_what_belongs_to_one_host_is_refused_before_ray_is_asked(
    worker: dict[str, Any], record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, kept = WorkerConfig(**{"model": ModelConfig("demo")} | worker), RecordConfig(**record)
    cluster = ClusterConfig(distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=message), launch(config, cluster, record=kept):
        pass


def test_mp_is_vllms_name_of_local() -> None:
    shapes = [ClusterConfig(distributed_executor_backend=name) for name in ("local", "mp", "ray")]  # type: ignore[arg-type]
    assert [(shape.on_ray, shape.has_several_processes) for shape in shapes] == [
        (False, False),
        (False, False),
        (True, True),
    ]


def test_with_ray_address_and_secret_have_defaults() -> None:
    ClusterConfig(distributed_executor_backend="ray", cluster_secret_file="f")
    ClusterConfig(distributed_executor_backend="ray", cluster_address="tcp:h:1")
    with pytest.raises(ConfigError, match="give both or none"):
        ClusterConfig(cluster_secret_file="f")


def test_numa_nodes_of_this_host_start_no_servers_on_ray() -> None:
    shape = ClusterConfig(distributed_executor_backend="ray")
    assert shape.on_nodes(2) is shape
