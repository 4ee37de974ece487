"""The order in which a change happens, step by step, with processes that do only what the test says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.publishing import Publisher, union
from moesaic.cluster.router import Router
from moesaic.cluster.scaling import Change, Changes, JoinedProcess, ScalingLimits
from moesaic.config import ClusterConfig, ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost, ScalingError
from moesaic.core.experts import Directory, ExpertLayout
from moesaic.core.placement import Placement
from moesaic.policy.placement import balance
from moesaic.transport.local import LocalConnection, local_pair

LAYOUT = ExpertLayout({0: "a"}, "g", "u", "d", 64, 32, 4, 2, "bfloat16")
ONE, TWO = {0: [0, 1, 2, 3]}, {0: [0, 1]}


@dataclass
class FakeProcess:
    connection: LocalConnection
    far: LocalConnection
    pid: int | None = 1
    stopped: bool = False
    host: str = ""
    host_id: str = ""
    role: Role = Role.SERVER
    capacity: float = 1.0
    resident_experts: dict[int, list[int]] = field(default_factory=dict)

    def describe_end(self) -> str:
        return "ended"

    def kill(self) -> None:
        self.stopped = True
        self.connection.close()

    def stop(self) -> None:
        self.stopped = True
        self.connection.close()


@dataclass
class Scene:
    """One attention worker, `count` expert servers that serve, and the change that the test advances."""

    count: int
    now: float = 0.0
    processes: dict[str, FakeProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        worker = WorkerConfig(ModelConfig("m"))
        self.router = Router()
        self.members = Members(worker, self.router, lambda member, message: None, lambda: self.now)
        self.publisher = Publisher(self.members, b"s" * 32)
        settings = ClusterConfig(expert_servers=self.count)
        load = np.ones((1, 4))
        limits = ScalingLimits(loading=10.0, taking=10.0, connecting=1.0, draining=5.0)
        clock = lambda: self.now  # noqa: E731
        self.changes = Changes(
            self.members, self.publisher, self.router, settings, lambda: load, clock, limits
        )
        self.changes.layout = LAYOUT
        servers = dict.fromkeys(range(self.count), 1.0)
        self.publisher.placement = balance.place(load, (0,), servers)
        for role, number in ((Role.WORKER, 1), (Role.SERVER, self.count)):
            for _ in range(number):
                member = self.members.add(role)
                self.members._listen(member, self.process(member.name))
                if role is Role.SERVER:
                    self.publisher.hold(member)
                    self.holds(member)
                member.stage = Stage.SERVING
        self.publisher.publish()
        self.said("attention worker 0")

    def process(self, name: str) -> FakeProcess:
        process = self.processes[name] = FakeProcess(*local_pair())
        return process

    def said(self, name: str) -> list[messages.Message]:
        """What a process was told since the last call."""
        found = []
        with contextlib.suppress(ConnectionLost):
            while (message := self.processes[name].far.receive(0.0)) is not None:
                found.append(message)
        return found

    def told_to_hold(self, name: str) -> list[dict[int, list[int]]]:
        return [message.experts for message in self.said(name) if isinstance(message, messages.Hold)]

    def directories(self) -> list[Directory]:
        """What the attention worker was told since the last call."""
        found = self.said("attention worker 0")
        return [message.directory for message in found if isinstance(message, messages.Serving)]

    def holds(self, member: Member) -> None:
        """Its answer."""
        member.confirmed_hold, member.stage = member.last_hold, Stage.SERVING

    def settle(self) -> None:
        self.members.workers[0].settled_version = self.publisher.version

    def end(self, change: Change) -> None:
        """Advances a change until its end, while time passes."""
        for _ in range(100):
            if not advance(change):
                return
            self.settle()
            self.now += 1.0
        raise AssertionError("the change does not end")


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Scene]]:
    """New servers are fakes of the last scene in the list."""
    scenes: list[Scene] = []

    def spawn(config: object) -> FakeProcess:
        return scenes[-1].process(scenes[-1].members.all_members[-1].name)

    monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spawn)
    yield scenes
    for scene in scenes:
        scene.members.stop()


def advance(change: Change) -> bool:
    """False once it is done."""
    try:
        next(change)
    except StopIteration:
        return False
    return True


def test_a_server_joins_loads_is_known_serves_and_only_then_the_others_drop(spawning: list[Scene]) -> None:
    scene = Scene(1)
    spawning.append(scene)
    scene.said("expert server 0")
    change = scene.changes.add_server()
    assert advance(change)
    [old, new] = scene.members.servers
    assert [len(held[0]) for held in scene.told_to_hold(new.name)] == [2]
    assert advance(change) and scene.directories() == [], "nobody hears of it before it has its experts"
    scene.holds(new)
    scene.publisher.publish()
    assert advance(change)
    [directory] = scene.directories()
    assert directory.experts == {0: ONE, 1: {}}, "clients connect before they need it"
    new.stats = type(new.stats)(clients=1)
    assert advance(change)
    [directory] = scene.directories()
    assert sorted(directory.experts[0][0] + directory.experts[1][0]) == [0, 1, 2, 3]
    assert scene.told_to_hold(old.name) == [], "calls under way still need them"
    scene.settle()
    assert not advance(change)
    assert scene.told_to_hold(old.name) == [directory.experts[0]]


def test_a_server_leaves_when_the_others_have_its_experts_and_nobody_asks_it(spawning: list[Scene]) -> None:
    scene = Scene(2)
    spawning.append(scene)
    scene.said("expert server 0")
    [stays, leaves] = scene.members.servers
    change = scene.changes.remove_server(leaves)
    assert advance(change) and advance(change)
    assert scene.told_to_hold(stays.name) == [ONE]
    assert scene.directories() == []
    scene.holds(stays)
    assert advance(change)
    [directory] = scene.directories()
    assert [entry.server for entry in directory.servers] == [0] and directory.experts == {0: ONE}
    assert leaves.stage is Stage.DRAINING and not scene.processes[leaves.name].stopped
    scene.settle()
    assert not advance(change)
    assert scene.members.servers == [stays]
    scene.members.stop()
    assert any(isinstance(message, messages.Shutdown) for message in scene.said(leaves.name))


@pytest.mark.parametrize("dies", [False, True])
def test_only_servers_that_live_through_a_move_tell_how_fast_experts_are_loaded(
    dies: bool, spawning: list[Scene]
) -> None:
    """Otherwise the seconds of a restart would make every later move look too dear, for ever."""
    scene = Scene(2)
    spawning.append(scene)
    [stays, leaves] = scene.members.servers
    guess = scene.changes.copy_bandwidth
    change = scene.changes.remove_server(leaves)
    assert advance(change)
    scene.now = 8.0
    stays.incarnation += dies
    scene.holds(stays)
    assert advance(change)
    assert scene.changes.copy_bandwidth == (guess if dies else 2 * LAYOUT.expert_bytes / 8.0)


def test_servers_that_are_gone_are_removed_together(spawning: list[Scene]) -> None:
    """One of them would otherwise have to load what the other one had, before either could be removed."""
    scene = Scene(3)
    spawning.append(scene)
    stays, *gone = scene.members.servers
    for member in gone:
        member.stage, member.child = Stage.STOPPED, None
    change = scene.changes.remove_gone()
    assert advance(change)
    assert scene.told_to_hold(stays.name)[-1] == ONE
    scene.holds(stays)
    assert advance(change)
    scene.settle()
    assert not advance(change)
    assert scene.members.servers == [stays]
    assert scene.directories()[-1].experts == {0: ONE}


@pytest.mark.parametrize("own_fault", [False, True])
def test_a_server_whose_join_another_one_spoilt_may_join_again(
    own_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Example: it joins while the host of an earlier server dies. After a Shutdown it would end for good."""
    scene = Scene(2)
    more = Placement(1, 4, {0: {0: [0, 1], 1: [0, 1, 2, 3], 2: [2]}})
    monkeypatch.setattr(scene.changes, "_plan_placement", lambda numbers, resident_experts: more)
    process = scene.process("expert server 2")
    change = scene.changes.add_server(JoinedProcess(process, "w"))  # type: ignore[arg-type]
    assert advance(change)
    newcomer = scene.members.servers[2]
    newcomer.confirmed_hold = newcomer.last_hold
    newcomer.stage = Stage.SERVING
    if own_fault:
        newcomer.stage, newcomer.complaint, newcomer.confirmed_hold = Stage.STARTING, "no such tensor", 0
    else:
        assert advance(change)
        scene.now = 2.0  # clients need not connect any more
        assert advance(change)
        scene.members.servers[1].stage = Stage.STOPPED
    with pytest.raises(ScalingError, match="no such tensor" if own_fault else "server 1 did not come up"):
        next(change)
    assert (messages.Shutdown() in scene.said("expert server 2")) == own_fault
    scene.members.stop()


def test_while_it_changes_a_restarted_server_holds_what_both_placements_give_it() -> None:
    before = Placement(0, 6, {0: {0: [1, 2], 1: [0, 3, 4, 5]}, 3: {0: [0, 1, 2, 3, 4, 5]}})
    after = Placement(1, 6, {0: {0: [2, 5], 1: [0, 1, 3, 4]}, 3: {1: [0, 1, 2, 3, 4, 5]}})
    assert union(0, (before, after)) == {0: [1, 2, 5], 3: [0, 1, 2, 3, 4, 5]}
    assert union(1, (after, None)) == {0: [0, 1, 3, 4], 3: [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_joins_while_servers_are_scaled_stays(fails: bool, spawning: list[Scene]) -> None:
    """A command for one role changes no other one, also where it is undone."""
    scene = Scene(1)
    spawning.append(scene)
    change = scene.changes.scale(2, None)
    assert advance(change)
    joined = scene.members.add(Role.WORKER)
    new = scene.members.servers[1]
    if fails:
        new.complaint = "no"
        with pytest.raises(ScalingError, match="the cluster is as it was"):
            scene.end(change)
    else:
        scene.holds(new)
        scene.end(change)
    assert joined in scene.members.workers and len(scene.members.workers) == 2
    assert len(scene.members.servers) == (1 if fails else 2)


def test_a_worker_that_leaves_while_servers_are_scaled_is_not_replaced(spawning: list[Scene]) -> None:
    scene = Scene(1)
    spawning.append(scene)
    joined = scene.members.add(Role.WORKER)
    change = scene.changes.scale(2, None)
    assert advance(change)
    scene.members.remove(joined)
    scene.holds(scene.members.servers[1])
    scene.end(change)
    assert len(scene.members.workers) == 1


@pytest.mark.parametrize("how", ["complains", "dies", "takes too long"])
def test_what_fails_before_it_is_published_is_taken_back(how: str, spawning: list[Scene]) -> None:
    scene = Scene(2)
    spawning.append(scene)
    before = scene.publisher.placement
    [stays, leaves] = scene.members.servers
    change = scene.changes.remove_server(leaves)
    assert advance(change)
    scene.said(stays.name)
    if how == "complains":
        stays.complaint = "tensor is missing"
    elif how == "dies":
        stays.stage = Stage.STOPPED
    else:
        scene.now = 11.0
    with pytest.raises(ScalingError, match="expert server 0"):
        next(change)
    assert scene.told_to_hold(stays.name) == [TWO], "what it took in vain"
    assert scene.publisher.placement is before and scene.publisher.next_placement is None
    assert scene.directories() == [] and leaves.stage is Stage.SERVING


def test_a_newcomer_that_cannot_be_started_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(1)
    before = scene.publisher.placement

    def spawn(config: object) -> FakeProcess:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spawn)
    monkeypatch.setattr("moesaic.cluster.launcher.spawn_worker", spawn)
    for servers, workers in ((2, 1), (1, 2)):
        with pytest.raises(ScalingError, match="temporarily unavailable; the cluster is as it was"):
            next(scene.changes.scale(servers, workers))
    assert (len(scene.members.workers), len(scene.members.servers)) == (1, 1)
    assert scene.publisher.placement is before and scene.publisher.next_placement is None
    scene.members.stop()


def test_a_newcomer_that_dies_is_no_longer_named(spawning: list[Scene]) -> None:
    scene = Scene(1)
    spawning.append(scene)
    change = scene.changes.add_server()
    assert advance(change)
    new = scene.members.servers[-1]
    new.deaths = [0.0] * 3
    new.stage = Stage.WAITING
    with pytest.raises(ScalingError, match="expert server 1 did not come up"):
        next(change)
    assert [member.number for member in scene.members.servers] == [0]
    assert [entry.server for entry in scene.directories()[-1].servers] == [0]


def test_a_worker_that_waits_to_be_restarted_holds_nothing_up(spawning: list[Scene]) -> None:
    scene = Scene(2)
    spawning.append(scene)
    [stays, leaves] = scene.members.servers
    change = scene.changes.remove_server(leaves)
    assert advance(change)
    scene.holds(stays)
    assert advance(change), "the worker has not said that it settled"
    scene.members.workers[0].stage = Stage.WAITING
    assert not advance(change)


def test_a_server_that_is_being_restarted_can_leave_and_does_not_come_back(spawning: list[Scene]) -> None:
    scene = Scene(2)
    spawning.append(scene)
    [stays, leaves] = scene.members.servers
    leaves.stage = Stage.STARTING
    change = scene.changes.remove_server(leaves)
    assert advance(change)
    scene.holds(stays)
    scene.settle()
    assert advance(change)
    assert leaves.stage is Stage.DRAINING
    scene.settle()
    assert not advance(change)
    assert scene.members.servers == [stays]


RANKS = ClusterConfig(data_parallel_size=2, enable_expert_parallel=True).resolve()


def test_ranks_pair_by_place_and_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers 0 and 1 of here, one that joined, one of here: the third place is the last one's."""
    spawned: list[WorkerConfig | ExpertServerConfig] = []

    def spawn(config: WorkerConfig | ExpertServerConfig) -> FakeProcess:
        spawned.append(config)
        return FakeProcess(*local_pair())

    monkeypatch.setattr("moesaic.cluster.launcher.spawn_worker", spawn)
    monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spawn)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    worker = WorkerConfig(ModelConfig("m", pin_threads=True))
    members = Members(worker, Router(), lambda member, message: None, lambda: 0.0, RANKS)
    for _ in range(2):
        members.add(Role.WORKER), members.add(Role.SERVER)
    members.adopt(members.add(Role.SERVER), FakeProcess(*local_pair()), "w", LAYOUT)  # type: ignore[arg-type]
    for role in Role:  # places whose numbers are gone
        members.remove(members.add(role))
        members.add(role)
    for member in members.workers:
        members.spawn_worker(member)
    for member in members.servers_of_launcher:
        members.spawn_server(member, LAYOUT)
    workers = [config for config in spawned if isinstance(config, WorkerConfig)]
    servers = [config for config in spawned if isinstance(config, ExpertServerConfig)]
    assert [config.own_server for config in workers] == [0, 1, 4]
    assert [config.cpus for config in workers] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]
    assert [config.cpus for config in servers] == [config.cpus for config in workers]
    members.stop()


def test_a_server_that_joined_is_no_part_of_a_pair() -> None:
    scene = Scene(3)
    changes = Changes(
        scene.members, scene.publisher, scene.router, RANKS, lambda: np.ones((1, 4)), lambda: 0.0
    )
    scene.members.servers[2].is_external = True
    for servers, workers in ((2, 2), (3, 2), (4, 3), (1, 1)):
        changes.check(servers, workers)
    for servers, workers, needed in ((4, 2, 3), (3, 3, 4), (2, 1, 1), (1, 2, 2)):
        message = f"expert_servers: got {servers} with {workers} attention_workers; .* needs {needed},"
        with pytest.raises(ScalingError, match=message):
            changes.check(servers, workers)
    scene.members.stop()


def test_whole_steps_as_graphs_need_a_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(1)
    cluster = ClusterConfig(expert_servers=1)
    changes = Changes(
        scene.members, scene.publisher, scene.router, cluster, lambda: np.ones((1, 4)), lambda: 0.0
    )
    monkeypatch.setattr(scene.members, "_gpus", ("0", "1", "2"))
    changes.check(3, 1)
    model = ModelConfig("m", device="cuda", kernels="triton", cudagraph_mode="full")
    monkeypatch.setattr(scene.members, "_worker_config", WorkerConfig(model))
    changes.check(2, 1)
    with pytest.raises(ScalingError, match="full needs a GPU for each of 4 processes; there are 3"):
        changes.check(3, 1)
    scene.members.servers[0].is_external = True
    changes.check(3, 1)  # three of these are here
    with pytest.raises(ScalingError, match="full needs a GPU for each of 4 processes; there are 3"):
        changes.check(3, 2)
    monkeypatch.setattr(scene.members.launcher, "is_remote", True)
    changes.check(9, 9)
    scene.members.stop()


def test_a_worker_without_requests_is_asked_again_to_look_for_late_answers(spawning: list[Scene]) -> None:
    scene = Scene(2)
    spawning.append(scene)
    [stays, leaves] = scene.members.servers
    change = scene.changes.remove_server(leaves)
    assert advance(change)
    scene.holds(stays)
    assert advance(change)
    scene.directories()
    for scene.now in (1.1, 1.2, 2.2):
        assert advance(change)
    assert len(scene.directories()) == 2, "once a second"


def test_a_server_of_another_host_gets_copies_of_those_that_are_here() -> None:
    """Two copies of four experts on three servers, one of them on another host with half of the capacity."""
    scene = Scene(2)
    members, settings = scene.members, ClusterConfig(expert_servers=2, min_replicas=2)
    where = lambda: {one.number: one.host_id for one in members.servers}  # noqa: E731
    clock = lambda: scene.now  # noqa: E731
    load = np.ones((1, 4))
    changes = Changes(members, scene.publisher, scene.router, settings, lambda: load, clock, hosts=where)
    changes.layout = LAYOUT
    scene.publisher.placement = balance.place(load, (0,), members.capacities, min_replicas=2)
    process = scene.process("expert server 2")
    process.host_id, process.capacity = "boot:7", 2.0 * members.servers[0].capacity
    change = changes.add_server(JoinedProcess(process, "w"))  # type: ignore[arg-type]
    assert advance(change)
    coming = scene.publisher.next_placement
    assert coming is not None and coming.experts_of(2, 0) == (0, 1, 2, 3)
    change.close()
    members.stop()


def test_a_server_that_joins_gets_the_experts_that_it_has_in_memory() -> None:
    scene = Scene(1)
    process = scene.process("expert server 1")
    process.capacity, process.resident_experts = scene.members.servers[0].capacity, {0: [1, 3]}
    change = scene.changes.add_server(JoinedProcess(process, "w"))  # type: ignore[arg-type]
    assert advance(change)
    assert scene.told_to_hold("expert server 1") == [{0: [1, 3]}]
    change.close()
    scene.members.stop()
