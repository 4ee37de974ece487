"""A cluster grows and shrinks while it serves: no request fails, every bit stays."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import Future

import pytest

from moesaic.cluster import launcher
from moesaic.cluster.local import ChildProcess
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, ScalingError
from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 6, 48
SCHEDULES = ("lockstep", "async", "barrier")


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


class Traffic:
    """Keeps requests coming until `future` is done, then a round more."""

    def __init__(self, served: Cluster) -> None:
        self.served = served

    def during(self, future: Future[None]) -> None:
        while not future.done():
            if len(self.served.running.unfinished) < COUNT:
                self.served.submit(*workload(COUNT, TOKENS))
            self.served.take(0.05)
        self.served.submit(*workload(COUNT, TOKENS))

    def check(self, expected: list[Answer]) -> None:
        answers = self.served.finish()
        assert len(answers) >= COUNT
        for number, answer in enumerate(answers):
            assert answer == expected[number % COUNT], f"request {number}"


def names(served: Cluster) -> list[str]:
    return [member.name for member in served.supervisor.status() if member.stage == "serving"]


def copies(served: Cluster) -> set[int]:
    """How many servers hold an expert."""
    return {copies for layer in served.supervisor.report().replicas for copies in (layer.least, layer.most)}


@pytest.mark.parametrize("schedule", pairs.some(SCHEDULES, SCHEDULES[2:]))
def test_servers_come_and_go_during_traffic(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=2, expert_servers=1, schedule=schedule) as served:
        traffic = Traffic(served)
        for servers, last in ((3, 2), (2, 1), (1, 0), (2, 3)):
            future = served.supervisor.scale(expert_servers=servers)
            traffic.during(future)
            future.result()
            now = [member for member in served.supervisor.status() if member.role == "expert server"]
            assert (len(now), now[-1].number) == (servers, last)
            assert min(member.experts for member in now) > 0
            assert copies(served) == {1}
        traffic.check(expected)
        counters = served.supervisor.report().counters
        assert (served.broken_off, counters.moved_requests, counters.process_deaths) == (0, 0, 0)


@pytest.mark.slow
def test_every_expert_keeps_its_copies(expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=3, min_replicas=2) as served:
        traffic = Traffic(served)
        for servers in (2, 3):
            future = served.supervisor.scale(expert_servers=servers)
            traffic.during(future)
            future.result()
            assert copies(served) == {2}
        traffic.check(expected)
        assert served.broken_off == 0


@pytest.mark.parametrize("schedule", pairs.some(SCHEDULES, SCHEDULES[1:2]))
def test_attention_workers_come_and_go_during_traffic(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=1, schedule=schedule) as served:
        traffic = Traffic(served)
        for workers in (3, 1, 2):
            future = served.supervisor.scale(attention_workers=workers)
            traffic.during(future)
            future.result()
            assert len([name for name in names(served) if name.startswith("attention")]) == workers
        traffic.check(expected)
        assert served.supervisor.report().counters.moved_requests == 0


def scaled(served: Cluster, workers: int) -> None:
    future = served.supervisor.scale(attention_workers=workers)
    served.until(future.done)
    future.result()


@pytest.mark.slow
def test_requests_of_a_worker_that_takes_too_long_to_drain_move(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(attention_workers=2, expert_servers=1) as served:
        change_queue = served.supervisor._changes
        limits = change_queue.changes._limits
        monkeypatch.setattr(change_queue.changes, "_limits", type(limits)(draining=0.0))
        while not served.supervisor.report().counters.moved_requests:  # they may have ended before it leaves
            scaled(served, 2)
            begun = served.running.tokens
            served.submit(*workload(COUNT, TOKENS))
            served.until(lambda begun=begun: served.running.tokens > begun + 20)
            scaled(served, 1)
            assert served.finish()[-COUNT:] == expected


@pytest.mark.slow
def test_a_newcomer_that_keeps_dying_leaves_everything_as_it_was(expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=2) as served:
        before = served.supervisor.placement
        served.submit(*workload(COUNT, TOKENS))
        future = served.supervisor.scale(expert_servers=4)

        def kill_the_fourth() -> bool:
            for member in served.supervisor.status():
                if member.name == "expert server 3" and member.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member.pid, signal.SIGKILL)
            return future.done()

        served.until(kill_the_fourth)
        with pytest.raises(ScalingError, match=r"expert server 3 did not come up: .*signal 9.*as it was"):
            future.result()
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 2 * expected
        status = served.supervisor.report()
        assert [member.name for member in status.processes[1:]] == ["expert server 0", "expert server 1"]
        assert status.change is None
        assert "expert server 3" in status.failures[-1].what
        assert before is not None and served.supervisor.placement is not None
        assert served.supervisor.placement.experts_by_layer == before.experts_by_layer


@pytest.mark.slow
def test_a_worker_that_keeps_dying_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(attention_workers=1, expert_servers=1) as served:
        spawn = launcher.spawn_worker

        def stillborn(config: WorkerConfig) -> ChildProcess:
            process = spawn(config)
            os.kill(process.pid, signal.SIGKILL)
            return process

        monkeypatch.setattr(launcher, "spawn_worker", stillborn)
        future = served.supervisor.scale(attention_workers=2)
        served.until(future.done)
        with pytest.raises(ScalingError, match="attention worker 1 did not come up"):
            future.result()
        assert names(served) == ["attention worker 0", "expert server 0"]


@pytest.mark.slow
def test_a_server_killed_while_another_joins_comes_back(expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=2, min_replicas=2) as served:
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: served.running.tokens > 20)
        future = served.supervisor.scale(expert_servers=3)
        os.kill(served.pid("expert server 0"), signal.SIGKILL)
        served.until(future.done)
        future.result()
        assert served.finish() == expected
        served.until(lambda: len(names(served)) == 4)
        assert copies(served) == {2}


@pytest.mark.slow
def test_what_can_never_be_is_refused_and_changes_nothing() -> None:
    with cluster(attention_workers=1, expert_servers=2, min_replicas=2) as served:
        version = served.supervisor.report().directory_version
        for servers, workers, error, message in (
            (1, None, ScalingError, "--min-replicas"),
            (0, None, ConfigError, "expert_servers: got 0"),
            (None, 0, ConfigError, "attention_workers: got 0"),
        ):
            with pytest.raises(error, match=message):
                served.supervisor.scale(servers, workers).result(60)
        assert served.supervisor.report().directory_version == version


@pytest.mark.slow
def test_by_hand_too_there_are_as_many_as_autoscaling_allows() -> None:
    with cluster(expert_servers=2, autoscale="1:2") as served:
        with pytest.raises(ScalingError, match="expert_servers: got 3; --autoscale allows 1 to 2") as refused:
            served.supervisor.scale(expert_servers=3).result(60)
        assert refused.value.conflict


@pytest.mark.slow
def test_ranks_stay_pairs(expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, own, beside = launcher.spawn_worker, [], []

    def spawn_worker(config: WorkerConfig) -> ChildProcess:
        own.append(config.own_server)
        beside.append(config.beside)
        return spawn(config)

    monkeypatch.setattr(launcher, "spawn_worker", spawn_worker)
    ranks = {"expert_servers": 0, "data_parallel_size": 2, "enable_expert_parallel": True}
    with cluster(min_replicas=2, **ranks) as served:  # type: ignore[arg-type]
        for servers, workers in ((3, None), (None, 3), (3, 2)):
            needed = workers or 2
            message = f"got {servers or 2} with {needed} attention_workers; .*-parallel needs {needed},"
            with pytest.raises(ScalingError, match=message) as refused:
                served.supervisor.scale(servers, workers).result(60)
            assert refused.value.conflict
        traffic = Traffic(served)
        for size in (3, 2, 3):
            future = served.supervisor.scale(size, size)
            traffic.during(future)
            future.result()
        traffic.check(expected)
        servers_now = [name for name in names(served) if name.startswith("expert")]
        assert servers_now == ["expert server 0", "expert server 1", "expert server 3"]
        assert own == [0, 1, 2, 3]
        assert beside == [1, 1, 2, 2], "other workers; servers compute on a GPU only when they are told to"


@pytest.mark.slow
def test_workers_that_do_everything_can_be_scaled_too(expected: list[Answer]) -> None:
    with cluster(attention_workers=2, expert_servers=0) as served:
        with pytest.raises(ScalingError, match="--expert-servers"):
            served.supervisor.scale(expert_servers=1).result(60)
        future = served.supervisor.scale(attention_workers=1)
        traffic = Traffic(served)
        traffic.during(future)
        future.result()
        assert names(served) == ["attention worker 0"]
        traffic.check(expected)
