"""Each process of a cluster gets its place in the NVSHMEM job once, if it is there when the job is formed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.cluster.test_changes import LAYOUT
from tests.cluster.test_joined_launcher import Line
from tests.support.fake_worker import info
from tests.support.hosts import soon

from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.router import Router
from moesaic.cluster.supervisor import Supervisor
from moesaic.config import ClusterConfig, ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.messages import JoinJob
from moesaic.gpu.nvshmem import package as nvshmem_package
from moesaic.gpu.nvshmem.places import NvshmemPlaces
from moesaic.models import files
from moesaic.transport.local import LocalConnection, local_pair

CLUSTER = ClusterConfig(attention_workers=2, prefill_workers=1, expert_servers=3, transport="nvshmem")


class Process:
    """A process that does nothing."""

    def __init__(self) -> None:
        self.connection = Line()
        self.pid: int | None = 1

    def describe_end(self) -> str:
        return "ended"

    def kill(self) -> None:
        self.connection.close()

    def stop(self) -> None:
        self.connection.close()


class Scene:
    """Two attention workers, a prefill worker and three expert servers."""

    def __init__(self, cluster: ClusterConfig = CLUSTER) -> None:
        told = lambda member, message: None  # noqa: E731
        self.members = Members(WorkerConfig(ModelConfig("m")), Router(), told, lambda: 0.0)
        self.places = NvshmemPlaces(self.members, cluster)
        self.lines: list[Line] = []
        for role in (*[Role.SERVER] * 3, Role.PREFILL, *[Role.WORKER] * 2):
            self.begin(self.members.add(role))

    def begin(self, member: Member) -> None:
        """Its next process starts."""
        process = Process()
        self.lines.append(process.connection)
        self.members._listen(member, process)  # type: ignore[arg-type]

    def serve(self, *members: Member, able: bool = True) -> None:
        """able: they can join a job."""
        for member in members:
            member.stage = Stage.SERVING
            if member.role is Role.SERVER:
                member.can_join_job = able
            elif member.role is Role.WORKER:
                member.job_id = f"made by {member.name}".encode() if able else b""

    def told(self, member: Member) -> list[messages.Message]:
        """What its process was told."""
        assert member.child is not None
        return member.child.connection.told  # type: ignore[attr-defined, no-any-return]

    def pes(self, *members: Member) -> list[int]:
        """The places that their processes were told, each once."""
        found = [self.told(member) for member in members]
        assert all(len(one) == 1 and isinstance(one[0], JoinJob) for one in found), found
        return [one[0].pe for one in found]  # type: ignore[union-attr]


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(*getattr(request, "param", ()))
    yield made
    for line in made.lines:
        line.close()


def test_workers_come_first_then_servers_and_each_is_told_once(scene: Scene) -> None:
    members = scene.members
    scene.serve(*members.all_members[:-1])
    scene.places.look()
    assert not any(map(scene.told, members.all_members)), "one of them loads"
    scene.serve(members.all_members[-1])
    for _ in range(2):
        scene.places.look()
    place = JoinJob(b"made by attention worker 0", 0, workers=2, servers=3)
    expected = [replace(place, pe=pe) for pe in range(5)]
    assert [scene.told(one) for one in (*members.workers, *members.servers)] == [[one] for one in expected]
    assert scene.told(members.prefill_workers[0]) == []


@pytest.mark.parametrize("scene", [(replace(CLUSTER, transport="auto"),)], indirect=True)
def test_without_nvshmem_nobody_is_told(scene: Scene) -> None:
    scene.serve(*scene.members.all_members)
    scene.places.look()
    assert not any(map(scene.told, scene.members.all_members))


@pytest.mark.parametrize("scene", [(replace(CLUSTER, nvshmem_pes=7),)], indirect=True)
def test_processes_of_other_hosts_are_in_it_once_they_serve(scene: Scene) -> None:
    """A server and a worker that join."""
    members = scene.members
    scene.serve(*members.all_members)
    server = members.add(Role.SERVER, on_trial=True)
    scene.begin(server)
    scene.places.look()
    scene.serve(server)
    worker = members.add(Role.WORKER, on_trial=True)
    scene.begin(worker)
    scene.serve(worker)
    server.on_trial = False
    scene.places.look()
    assert not any(map(scene.told, members.all_members)), "the worker may still be removed"
    worker.on_trial = False
    scene.places.look()
    assert scene.pes(*members.workers, *members.servers) == [*range(7)]


def test_who_comes_later_is_in_no_job(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A process that was restarted, and one that was added."""
    members = scene.members
    scene.serve(*members.all_members)
    scene.places.look()
    again, added = members.servers[1], members.add(Role.WORKER)
    again.record_death("killed", 0.0, RestartRule())
    scene.begin(again)
    scene.begin(added)
    scene.places.look()
    scene.serve(again, added)
    for _ in range(2):
        scene.places.look()
    assert scene.told(again) == scene.told(added) == []
    assert caplog.messages == [
        f"{name} is not in the NVSHMEM job, which was formed before it served: decode steps that need it are "
        "computed in parts"
        for name in ("attention worker 2", "expert server 1")
    ]


def test_the_job_is_that_of_the_processes_that_can_join_one(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The others were in one of an earlier cluster."""
    members = scene.members
    old = members.workers[0], members.servers[2]
    scene.serve(*members.all_members)
    scene.serve(*old, able=False)
    for _ in range(2):
        scene.places.look()
    assert scene.pes(members.workers[1], *members.servers[:2]) == [0, 1, 2]
    assert scene.told(members.servers[0]) == [JoinJob(b"made by attention worker 1", 1, 1, 2)]
    assert [scene.told(one) for one in old] == [[], []]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        f"{one.name} is not in the NVSHMEM job, as its process cannot join one" for one in old
    ]


@pytest.mark.parametrize("who", ["attention worker", "expert server"])
def test_without_a_worker_and_a_server_there_is_no_job(
    who: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    members = scene.members
    scene.serve(*members.all_members)
    scene.serve(*(one for one in members.all_members if one.role.value == who), able=False)
    for _ in range(2):
        scene.places.look()
    assert not any(map(scene.told, members.all_members))
    assert caplog.messages == [f"no {who} can join an NVSHMEM job: decode steps are computed in parts"]


def test_another_thread_of_the_supervisor_goes_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends when it tells the second process. Meanwhile the last one is restarted."""
    members = scene.members
    scene.serve(*members.all_members)
    send, gone = Line.send, scene.lines[5]

    def once(line: Line, message: messages.Message) -> None:
        if line is gone:
            monkeypatch.setattr(Line, "send", send)
            raise SystemExit("a bug")
        send(line, message)

    monkeypatch.setattr(Line, "send", once)
    with pytest.raises(SystemExit):
        scene.places.look()
    last = members.servers[2]
    last.record_death("killed", 0.0, RestartRule())
    scene.begin(last)
    for _ in range(2):
        scene.places.look()
    assert scene.pes(*members.workers, *members.servers[:2]) == [0, 1, 2, 3] and scene.told(last) == []


class Launched:
    """A launcher of processes that do nothing. The test says what they send."""

    is_remote = False

    def __init__(self) -> None:
        self.near: dict[str, LocalConnection] = {}

    def start_worker(self, member: Member, config: WorkerConfig) -> Process:
        return self._start(member)

    def start_server(self, member: Member, config: ExpertServerConfig) -> Process:
        return self._start(member)

    def _start(self, member: Member) -> Process:
        process, (far, self.near[member.name]) = Process(), local_pair()
        process.connection = far  # type: ignore[assignment]
        return process

    def request_hosts(self, wanted: object) -> None: ...

    def stop(self) -> None: ...


def heard(connection: LocalConnection) -> JoinJob:
    """The place that a process gets. It is asked for nothing else."""
    while not isinstance(message := connection.receive(20.0), JoinJob):
        assert message is not None
    return message


def test_the_supervisor_tells_a_cluster_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem_package, "MODULE", "json")
    path = str(files.resolve("demo"))
    model = ModelConfig(path, device="cuda", kernels="triton", cudagraph_mode="full")
    cluster, launcher = ClusterConfig(expert_servers=1, transport="nvshmem"), Launched()
    supervisor = Supervisor(WorkerConfig(model), cluster, Router(), time.monotonic, launcher=launcher)  # type: ignore[arg-type]
    supervisor.start()
    worker = launcher.near["attention worker 0"]
    try:
        worker.send(messages.Layout(LAYOUT))
        soon(lambda: "expert server 0" in launcher.near)
        server = launcher.near["expert server 0"]
        server.send(messages.HoldReply(1, Endpoint("unix:@a"), "triton", nvshmem=True))
        worker.send(messages.Ready(info(), nvshmem=b"name"))
        assert [heard(one) for one in (worker, server)] == [JoinJob(b"name", pe, 1, 1) for pe in (0, 1)]
    finally:
        supervisor.stop()
