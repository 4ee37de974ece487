"""Processes that joined serve under another supervisor, and load nothing again."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.cluster.joined_launcher import JoinedLauncher
from moesaic.cluster.member import Role
from moesaic.cluster.supervisor import Supervisor
from moesaic.transport.secret import create_secret
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_kept_experts import Joined, loads, settled  # noqa: F401
from tests.support.cluster_driver import Cluster, cluster
from tests.support.hosts import soon
from tests.support.processes import children

pytestmark = pytest.mark.full
WORK = workload(4, 32)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nobody listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def standby(
    door: dict[str, Any], port: int, begun: Callable[[Supervisor], None] = lambda _: None, **shape: Any
) -> Any:
    """A cluster that has taken over: its processes are those that join."""
    address = f"tcp:127.0.0.1:{port}"
    settings = {"standby_for": "tcp:127.0.0.1:1", "cluster_address": address, **shape}
    return cluster(**door | settings, begun=begun)


def waiting(supervisor: Supervisor, role: Role) -> int:
    """Number of processes that have called and have no place yet."""
    launcher = supervisor._members.launcher
    assert isinstance(launcher, JoinedLauncher)
    return len(launcher._waiting[role])


def call(supervisor: Supervisor, servers: list[Joined]) -> None:
    """The servers join, one after the other."""
    for number, server in enumerate(servers):
        server.may_call.set()
        soon(lambda count=number + 1: waiting(supervisor, Role.SERVER) == count)


def vanish(served: Cluster) -> None:
    """The supervisor is gone without a word."""
    newcomers, members = served.supervisor._newcomers, served.supervisor._members
    assert newcomers is not None
    newcomers.listener.close()
    for member in members.all_members:
        if member.child is not None:
            member.child.connection.close()


class Worker:
    """`moesaic join` for a worker, as a person types it."""

    def __init__(self, ports: list[int], secret: Path, log: Path, role: str) -> None:
        self._log = log
        address = ",".join(f"127.0.0.1:{port}" for port in ports)
        command = [sys.executable, "-m", "moesaic", "join", address, "--role", role]
        command += ["--secret-file", str(secret), "--threads", "1"]
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)

    @property
    def child(self) -> int:
        """The process that computes."""
        [pid] = children(self._process.pid)
        return pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(ports: list[int], role: str = "attention-worker") -> Worker:
        started.append(Worker(ports, tmp_path / "secret", tmp_path / f"log-{len(started)}", role))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_experts_stay_where_they_are(
    door: dict[str, Any],
    workers: Callable[..., Worker],
    loads: list[tuple[int, int]],  # noqa: F811
) -> None:
    """Three servers, each with a third of the experts, call the second supervisor in another order."""
    ports, secret = free_ports(2), Path(door["cluster_secret_file"])
    create_secret(secret)
    addresses = ",".join(f"tcp:127.0.0.1:{port}" for port in ports)
    servers = [Joined(addresses, secret, may_call=False) for _ in range(3)]

    def first(supervisor: Supervisor) -> None:
        call(supervisor, servers)
        workers(ports[:1])

    def second(supervisor: Supervisor) -> None:
        call(supervisor, [servers[2], servers[0], servers[1]])
        workers(ports[1:])

    with standby(door, ports[0], first, expert_servers=3) as served:
        served.submit(*WORK)
        assert served.finish() == alone(*WORK)
        settled(served, [0, 1, 2])
        before = served.supervisor.placement
        for server in servers:
            server.may_call.clear()
        loaded = loads.copy()
        vanish(served)
    assert before is not None and len(loaded) == len(set(loaded)) > 0
    with standby(door, ports[1], second, expert_servers=3) as served:
        served.submit(*WORK)
        assert served.finish() == alone(*WORK)
        settled(served, [0, 1, 2])
        after = served.supervisor.placement
        assert after is not None
        assert [after.of(number) for number in range(3)] == [before.of(number) for number in (2, 0, 1)]
        assert loads == loaded and [one.kept.num_loads for one in servers] == [1, 1, 1]
    for server in servers:
        server.end()


@pytest.mark.parametrize(
    ("servers", "prefill"), [(0, 0), (1, 0), (1, 1)], ids=["alone", "with servers", "with prefill workers"]
)
def test_workers_keep_their_weights(
    servers: int, prefill: int, door: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    """The first supervisor vanishes in the middle of requests. The second one gets the same processes."""
    ports, secret = free_ports(2), Path(door["cluster_secret_file"])
    create_secret(secret)
    shape = {"expert_servers": servers, "prefill_workers": prefill}
    addresses = ",".join(f"tcp:127.0.0.1:{port}" for port in ports)
    joined = [Joined(addresses, secret, may_call=False) for _ in range(servers)]
    started: list[Worker] = []

    def begun(supervisor: Supervisor) -> None:
        call(supervisor, joined)
        roles = "attention-worker", *["prefill-worker"] * prefill
        started.extend(workers(ports, role) for role in roles)

    with standby(door, ports[0], begun, **shape) as served:
        served.submit(*WORK)
        assert served.finish() == alone(*WORK)
        served.submit(*WORK)
        served.until(lambda: served.running.tokens > 4 * 32 + 20)
        processes = [one.child for one in started]
        vanish(served)
    with standby(door, ports[1], **shape) as served:
        served.submit(*WORK)
        assert served.finish() == alone(*WORK)
        assert [one.child for one in started] == processes, "\n".join(one.log for one in started)
        assert ["are still there" in one.log for one in started] == [True] * (1 + prefill)
    for server in joined:
        server.end()
