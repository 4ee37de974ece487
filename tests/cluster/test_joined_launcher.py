"""The places of a cluster that takes over go to the processes that call, first come, first served."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster import joined_launcher
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joined_launcher import JoinedLauncher
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, Role
from moesaic.config import ClusterConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.jobs.batch.local import serving
from tests.support.hosts import soon

WORKER = WorkerConfig(ModelConfig("m", device="cpu"))
DOOR: dict[str, Any] = {"cluster_address": "tcp:10.0.0.2:7000", "cluster_secret_file": "s"}


class Line:
    """The connection to a process."""

    def __init__(self) -> None:
        self.told: list[messages.Message] = []
        self.loss_reason: str | None = None
        self._end = threading.Event()

    def send(self, message: messages.Message) -> None:
        self.told.append(message)

    def receive(self, timeout: float | None) -> None:
        if self._end.wait(timeout):
            raise ConnectionLost("closed")

    def wait_for_end(self, timeout: float) -> bool:
        return self._end.wait(timeout)

    def close(self) -> None:
        self._end.set()


def caller(role: Role = Role.WORKER, sets: tuple[str, ...] = ("avx2",)) -> RemoteProcess:
    return RemoteProcess(Line(), "10.0.0.3:5", role, instruction_sets=sets)  # type: ignore[arg-type]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> JoinedLauncher:
    monkeypatch.setattr(
        joined_launcher.fingerprint, "compute_fingerprint", lambda path: f"of {Path(path).name}"
    )
    made = JoinedLauncher(WORKER)
    made.request_hosts({Role.WORKER: 2, Role.SERVER: 1, Role.PREFILL: 0})
    return made


def place(launcher: JoinedLauncher, number: int = 0) -> LaunchedProcess:
    member = Member(Role.WORKER, number)
    member.child = process = launcher.start_worker(member, WORKER)
    return process


def test_who_calls_gets_a_place_and_its_settings(launcher: JoinedLauncher) -> None:
    first = place(launcher)
    soon(lambda: first.member.waiting == "waiting for moesaic join --role attention-worker")
    process = caller()
    assert launcher.take(process)
    soon(lambda: first.peer is process)
    assert first.member.host == "10.0.0.3" and not first.member.waiting
    [enlisted] = process.connection.told  # type: ignore[attr-defined]
    assert (enlisted.model, enlisted.weights) == ("m", "of m")
    assert WorkerConfig.from_json(enlisted.config).model.kernels == "avx2"
    assert not launcher.take(caller()), "one place is taken, and no other one is free"
    first.kill()
    soon(lambda: not first.is_running)


def test_who_calls_before_there_are_places_waits_for_one(launcher: JoinedLauncher) -> None:
    gone, stays = caller(), caller()
    assert launcher.take(gone) and launcher.take(stays)
    assert not launcher.take(caller()) and not launcher.take(caller(Role.PREFILL))
    gone.kill()
    first = place(launcher)
    soon(lambda: first.peer is stays)
    first.kill()
    soon(lambda: not first.is_running)


def test_another_instruction_set_than_that_of_the_first_one_is_refused(launcher: JoinedLauncher) -> None:
    first = place(launcher)
    assert launcher.take(caller(sets=("avx512", "avx2")))
    soon(lambda: first.peer is not None)
    second = place(launcher, 1)
    other = caller(sets=("avx2",))
    other.connection._end.set = lambda: None  # type: ignore[attr-defined]
    assert launcher.take(other)
    soon(lambda: not second.is_running)
    assert "this cluster computes with avx512, which the CPU of 10.0.0.3 lacks" in second.describe_end()
    first.kill()


def test_a_worker_that_may_have_a_gpu_chooses_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_launcher.fingerprint, "compute_fingerprint", lambda path: "w")
    made = JoinedLauncher(WorkerConfig(ModelConfig("m")))
    assert (
        made._choose_instruction_set(caller()) is None
        and made._choose_instruction_set(caller(Role.SERVER)) == "avx2"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": "0", **DOOR},
        {"enable_expert_parallel": True, "data_parallel_size": 2, **DOOR},
        {"placement": "file", "expert_servers": 2, **DOOR},
        {"distributed_executor_backend": "ray"},
        {},
    ],
)
def test_settings_that_a_standby_cannot_have(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--standby-for"):
        ClusterConfig(standby_for="tcp:10.0.0.1:7000", **settings)


def test_only_serve_stands_by() -> None:
    async def begin() -> None:
        async with serving(WORKER, ("m",), ClusterConfig(standby_for="tcp:10.0.0.1:7000", **DOOR)):
            pass

    with pytest.raises(ConfigError, match="--standby-for: got .* only serve stands by"):
        asyncio.run(begin())
