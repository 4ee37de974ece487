"""Which hosts compute as ranks of which worker, without processes."""

from __future__ import annotations

import pytest

from moesaic.cluster.admission import choose_local_set, explain_refusal
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.member import Member, Role, Stage
from moesaic.cluster.members import Members
from moesaic.cluster.router import Router
from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.transport.local import local_pair
from tests.cluster.test_changes import FakeProcess

MEETING = messages.RanksMeet("tcp:10.0.0.1:5", b"secret")
GROUP = WorkerConfig(ModelConfig("m", device="cpu"), parallel=ParallelConfig(6, nnodes=3))


class Launcher:
    """Starts fakes."""

    is_remote = False

    def start_worker(self, member: Member, config: WorkerConfig) -> FakeProcess:
        return FakeProcess(*local_pair())

    def stop(self) -> None:
        pass


@pytest.fixture
def members() -> Members:
    """One worker, whose ranks are on three hosts."""
    nobody = lambda member, message: None  # noqa: E731
    found = Members(GROUP, Router(), nobody, lambda: 0.0, launcher=Launcher())  # type: ignore[arg-type]
    found.add(Role.WORKER)
    return found


def join(members: Members, fits: bool = True) -> tuple[Member, FakeProcess]:
    process, member = FakeProcess(*local_pair(), host="10.0.0.2", role=Role.RANKS), members.add(Role.RANKS)
    members.adopt(member, process, "w", None)  # type: ignore[arg-type]
    assert isinstance(process.far.receive(5.0), messages.EnlistReply)
    member.is_fit = fits
    return member, process


def test_a_worker_starts_once_all_hosts_are_there(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    [worker] = members.workers
    for _ in range(2):
        members.spawn_worker(worker)
    assert worker.stage is Stage.WAITING and worker.child is None
    assert worker.waiting == "waits for `moesaic join --role ranks` of 2 more hosts"
    join(members)
    join(members, fits=False)  # it still compares its checkpoint
    members.spawn_worker(worker)
    assert worker.waiting.endswith("of 1 more host") and worker.child is None
    assert len(caplog.records) == 1
    join(members)
    spare, _ = join(members)
    members.spawn_worker(worker)
    assert (worker.stage, worker.waiting) == (Stage.STARTING, "") and worker.child is not None
    assert [one.number for one in members.ranks.list_group(worker)] == [0, 2] and spare.is_spare
    members.stop()


def started(members: Members) -> tuple[Member, list[tuple[Member, FakeProcess]]]:
    [worker] = members.workers
    found = [join(members) for _ in range(2)]
    members.spawn_worker(worker)
    return worker, found


def test_each_host_is_told_where_the_ranks_meet_and_its_number(members: Members) -> None:
    worker, found = started(members)
    members.ranks.meet(worker, MEETING)
    told = [process.far.receive(5.0) for _, process in found]
    assert told == [messages.RanksMeet("tcp:10.0.0.1:5", b"secret", node) for node in (1, 2)]
    members.ranks.serve(worker)
    worker.stage = Stage.SERVING
    join(members)
    assert members.all_serve and [one.stage for one, _ in found] == [Stage.SERVING] * 2
    members.stop()


@pytest.mark.parametrize("victim", ["worker", "ranks"])
def test_a_group_ends_as_a_whole_and_the_next_one_is_another(victim: str, members: Members) -> None:
    worker, found = started(members)
    spare, process = join(members)
    first = worker.child
    assert isinstance(first, FakeProcess)
    gone = worker if victim == "worker" else found[0][0]
    members.ranks.remove_group(gone)
    assert [first.stopped, found[0][1].stopped, found[1][1].stopped] == [
        victim != "worker", victim == "worker", True,
    ]  # fmt: skip
    assert members.ranks.members == [spare] and not process.stopped
    members.spawn_worker(worker)
    assert worker.stage is Stage.WAITING
    for member, _ in found:  # their ends are reported later
        members.ranks.remove_group(member)
    again, _ = join(members)
    members.spawn_worker(worker)
    assert worker.stage is Stage.STARTING and members.ranks.list_group(worker) == [spare, again]
    members.stop()


def test_a_worker_that_is_removed_frees_its_hosts(members: Members) -> None:
    worker, found = started(members)
    members.remove(worker)
    assert all(process.stopped for _, process in found) and members.ranks.members == []
    members.stop()


def test_ranks_compute_with_the_choose_local_set(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cluster.joining.enlisting.instruction_sets", lambda: ("avx512", "avx2"))

    def other(*sets: str) -> str | None:
        process = RemoteProcess(None, "10.0.0.2:1", Role.RANKS, instruction_sets=sets)  # type: ignore[arg-type]
        return members.explain_difference(process)

    told = other("avx2", "portable")
    assert told is not None and "computes with avx512, which the CPU of 10.0.0.2 lacks" in told
    assert other("avx512", "avx2") is None
    assert choose_local_set("avx2") == "avx2"
    assert choose_local_set("reference") is None


@pytest.mark.parametrize(
    ("role", "nodes", "wrong"),
    [
        (Role.RANKS, 1, "--role ranks: the cluster was started without --nnodes"),
        (Role.RANKS, 2, None),
        (Role.WORKER, 2, "--role attention-worker: each worker of this cluster has ranks on 2 hosts"),
        (Role.PREFILL, 2, "--role prefill-worker: each worker of this cluster has ranks on 2 hosts"),
        (Role.WORKER, 1, None),
    ],
)
def test_who_may_join(role: Role, nodes: int, wrong: str | None) -> None:
    found = explain_refusal(
        role, WorkerConfig(ModelConfig("m"), parallel=ParallelConfig(2, nnodes=nodes)), True
    )
    assert (found is None) if wrong is None else (found or "").startswith(wrong)
