"""Which GPUs a process of the host sees, planned on machines that have none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.launch import launch
from moesaic.cluster.local import spawn_server
from moesaic.cluster.member import Member, RestartRule, Role
from moesaic.cluster.members import Members
from moesaic.cluster.report import process_status
from moesaic.cluster.router import Router
from moesaic.commands.processes import as_lines
from moesaic.config import (
    ClusterConfig,
    ExpertServerConfig,
    ModelConfig,
    ParallelConfig,
    WorkerConfig,
    gpus,
)
from moesaic.core.errors import ConfigError
from moesaic.transport.local import local_pair
from tests.cluster.test_changes import LAYOUT, FakeProcess
from tests.support.gpu_sanitizer import sanitized
from tests.support.processes import gone

CUDA = WorkerConfig(ModelConfig("m", device="cuda"))
Started = list[tuple[tuple[str, ...], int | None]]
"""The GPUs of each process that was started, and what a worker was told to be beside."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """A host with four GPUs that the user chose, and processes that do nothing."""
    found: Started = []

    def spawn(config: WorkerConfig | ExpertServerConfig) -> FakeProcess:
        found.append((config.devices, getattr(config, "beside", None)))
        return FakeProcess(*local_pair())

    monkeypatch.setattr("moesaic.cluster.launcher.spawn_worker", spawn)
    monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spawn)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    return found


@pytest.fixture
def fleet() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(worker: WorkerConfig, workers: int, servers: int, **settings: Any) -> Members:
        members = Members(worker, Router(), lambda *_: None, lambda: 0.0, ClusterConfig(**settings))
        made.append(members)
        for role, count in ((Role.WORKER, workers), (Role.SERVER, servers)):
            for _ in range(count):
                members.add(role)
        return members

    yield make
    for members in made:
        members.stop()


def spawn_all(members: Members) -> None:
    for member in members.workers:
        members.spawn_worker(member)
    for member in members.servers_of_launcher:
        members.spawn_server(member, LAYOUT)


def test_workers_then_servers_take_the_gpus_in_turn(started: Started, fleet: Callable[..., Members]) -> None:
    members = fleet(CUDA, 2, 3)
    spawn_all(members)
    assert started == [(("4",), 1), (("5",), 0), (("6",), None), (("7",), None), (("4",), None)]


def test_servers_use_the_cpu_unless_cuda_is_given(started: Started, fleet: Callable[..., Members]) -> None:
    spawn_all(fleet(CUDA, 1, 2))
    assert [devices for devices, _ in started] == [("4",), ("5",), ("6",)]
    started.clear()
    members = fleet(replace(CUDA, model=ModelConfig("m", device="cpu")), 2, 2)
    spawn_all(members)
    assert started == [((), 1), ((), 1), ((), None), ((), None)]


def test_a_restart_keeps_the_gpu_and_a_new_process_takes_one_that_is_free(
    started: Started, fleet: Callable[..., Members]
) -> None:
    members = fleet(CUDA, 3, 1)
    spawn_all(members)
    first = members.workers[1]
    first.record_death("killed", 0.0, RestartRule())
    members.spawn_worker(first)
    assert started[-1] == (("5",), 0)
    members.remove(first)
    later = members.add(Role.WORKER)
    members.spawn_worker(later)
    assert started[-1] == (("5",), 0) and later.number == 3
    members.spawn_worker(members.add(Role.WORKER))
    assert started[-1] == (("4",), 1), "all four are taken"


def test_a_group_of_ranks_has_neighbouring_gpus(started: Started, fleet: Callable[..., Members]) -> None:
    group = replace(CUDA, parallel=ParallelConfig(tensor_parallel_size=2))
    spawn_all(fleet(group, 2, 1))
    assert started == [(("4", "5"), 1), (("6", "7"), 0), (("4",), None)]


def test_the_flag_comes_before_the_variable(started: Started, fleet: Callable[..., Members]) -> None:
    spawn_all(fleet(CUDA, 3, 0, devices="2,GPU-8a"))
    assert [devices for devices, _ in started] == [("2",), ("GPU-8a",), ("2",)]


def test_a_server_of_another_host_has_none_of_these(started: Started, fleet: Callable[..., Members]) -> None:
    members = fleet(CUDA, 1, 0)
    members.adopt(members.add(Role.SERVER, capacity=4.0), FakeProcess(*local_pair()), "w", LAYOUT)  # type: ignore[arg-type]
    assert members.servers[0].devices == ()


def test_gpus_of_the_host(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus(None, {}, tmp_path) == ("0", "1"), "CUDA numbers those of a container from 0"
    assert gpus(None, {"CUDA_VISIBLE_DEVICES": "1,0"}, tmp_path) == ("1", "0")
    assert gpus(None, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert gpus(None, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ("0",), "as CUDA reads it"
    assert gpus("3, 1", {"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == ("3", "1")


def _environment(pid: int) -> list[str]:
    """The variables of a process, which has none for a moment while it begins its program."""
    file = Path(f"/proc/{pid}/environ")
    while not (found := file.read_bytes()):
        time.sleep(0.001)
    return found.decode().split("\0")


def test_a_process_is_started_with_its_gpu_alone() -> None:
    config = ExpertServerConfig("nowhere", LAYOUT, "unix:@", devices=("6",))
    assert ExpertServerConfig.from_json(config.to_json()).devices == ("6",)
    assert WorkerConfig.from_json(replace(CUDA, devices=("1", "2")).to_json()).devices == ("1", "2")
    child = spawn_server(config)
    try:
        assert "CUDA_VISIBLE_DEVICES=6" in _environment(child.pid)
    finally:
        child.stop()
    assert gone(child.pid)


def test_the_status_shows_the_map() -> None:
    member = Member(Role.SERVER, 2, devices=("6",))
    assert process_status(member, None, 0.0).devices == "6"
    status: dict[str, Any] = {
        "processes": [
            {"name": "worker 0", "role": "attention worker", "pid": 7, "stage": "serving", "devices": "4"},
        ],
        "replicas": [], "transport": None, "dispatch": "least-loaded", "join_address": None, "paced": None,
        "watched": True, "hosts": [], "links": [], "placement_solve": None,
    }  # fmt: skip
    [table, *_] = as_lines(status)
    assert "gpu" in table and table.split()[-1] == "4"
    status["processes"][0]["devices"] = ""
    assert "gpu" not in as_lines(status)[0]


@pytest.mark.parametrize(
    ("text", "message"), [("", "numbers or UUIDs"), ("0,,1", "numbers or UUIDs"), ("1,1", "each once")]
)
def test_lists_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--devices: got '{text}'; allowed: .*{message}"):
        ClusterConfig(devices=text)


def test_gpus_are_not_for_the_cpu() -> None:
    with (
        pytest.raises(ConfigError, match="^--devices: got '0'; allowed: nothing with --device cpu"),
        launch(WorkerConfig(ModelConfig("demo", device="cpu")), ClusterConfig(devices="0")),
    ):
        pass


def test_the_stand_in_has_four_devices() -> None:
    """As many ranks as GPUs need not be told how much of a GPU to take."""
    from moesaic.runtime.model_loading import check_gpu_sharing, count_gpus

    with sanitized(devices=4):
        assert count_gpus(CUDA.model) == 4
        check_gpu_sharing(replace(CUDA, parallel=ParallelConfig(tensor_parallel_size=4)))
        with pytest.raises(ConfigError, match="^--kv-cache-memory: got 'auto'; allowed: a size"):
            check_gpu_sharing(replace(CUDA, parallel=ParallelConfig(tensor_parallel_size=5)))
