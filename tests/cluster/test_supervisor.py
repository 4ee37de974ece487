"""The supervisor meets what nobody expected, or dies: every request has the bits that it has without."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest

from moesaic.cluster import local
from moesaic.cluster.change_queue import ChangeQueue, _QueuedChange
from moesaic.cluster.links import Links
from moesaic.cluster.member import RestartRule, Stage
from moesaic.commands.processes import as_lines
from moesaic.config import ClusterConfig, ExpertServerConfig
from moesaic.core.errors import ConnectionLost, ScalingError
from moesaic.policy.placement import balance
from moesaic.policy.placement.spreading import count_exposed
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.cluster_metrics import ClusterCollector
from moesaic.server.service import Service
from tests.cluster.test_changes import LAYOUT, Scene
from tests.cluster.test_failures import raising
from tests.cluster.test_identity import alone, workload
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 4, 48
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


class Plan:
    """What is done when so many tokens are there."""

    def __init__(self, *steps: tuple[int, Callable[[], None]]) -> None:
        self.steps = list(steps)

    def __call__(self, tokens: int) -> None:
        while self.steps and tokens >= self.steps[0][0]:
            self.steps.pop(0)[1]()


def killing(served: Cluster, name: str) -> Callable[[], None]:
    return lambda: os.kill(served.pid(name), signal.SIGKILL)


def doing(served: Cluster, action: Callable[[], None]) -> Callable[[], None]:
    """Has the supervisor's thread do it."""
    return lambda: served.supervisor._members.inbox.put(action)


def failures(served: Cluster) -> list[str]:
    return [failure.what for failure in served.supervisor.report().failures]


def unwatch(served: Cluster) -> None:
    """Let the supervisor's thread die, and no other one take its place."""
    served.supervisor._watchdog.rule = RestartRule(max_deaths=1)
    doing(served, raising(SystemExit("a bug")))()
    served.until(lambda: not served.supervisor.report().watched)


def processes_up(served: Cluster) -> dict[str, float]:
    """As metrics tell it: role -> how many."""
    [family] = [
        one
        for one in ClusterCollector(served.supervisor, "demo").collect()
        if one.name == "moesaic:processes_up"
    ]
    return {sample.labels["role"]: sample.value for sample in family.samples}


def status_over_http(served: Cluster) -> Any:
    """As a person asks for it."""
    launched = served._launched
    engine = AsyncEngine(launched.engine, launched.connection)
    service = Service(engine, "demo", {}, "0", cluster=served.supervisor)

    async def get() -> Any:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get("/v1/fault_tolerance/status")).raise_for_status().json()

    return asyncio.run(get())


@SLOW
def test_a_bug_in_one_action_does_not_end_the_watch(expected: list[Answer]) -> None:
    with cluster(attention_workers=1, expert_servers=2, min_replicas=2) as served:
        served.submit(*workload(COUNT, TOKENS))
        plan = Plan((20, doing(served, raising(KeyError("a bug")))), (60, killing(served, "expert server 0")))
        assert served.finish(plan) == expected and not plan.steps
        served.until(lambda: [m.incarnation for m in served.supervisor.status()] == [1, 2, 1])
        assert served.supervisor.report().watched
        assert failures(served)[0] == "the supervisor: KeyError: 'a bug'"


SCHEDULES = ["lockstep", "async", "barrier"]


@SLOW
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_go_on_when_nobody_watches(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule=schedule) as served:
        pids = [member.pid for member in served.supervisor.status()]
        served.submit(*workload(COUNT, TOKENS))
        served.supervisor._watchdog.rule = RestartRule(max_deaths=1)
        assert served.finish(Plan((20, doing(served, raising(SystemExit("a bug")))))) == expected
        served.until(lambda: not served.supervisor.report().watched)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((5 * TOKENS, killing(served, "expert server 0")))) == 2 * expected
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((8 * TOKENS + 4, killing(served, "attention worker 0")))) == 3 * expected
        assert served.supervisor.report().counters.moved_requests > 0
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@SLOW
def test_that_nobody_watches_is_told() -> None:
    with cluster() as served:
        assert status_over_http(served)["watched"]
        unwatch(served)
        status = status_over_http(served)
        assert not status["watched"] and len(status["processes"]) == 3
        [failure] = status["failures"]
        assert failure["what"] == (
            "the supervisor has stopped, so processes are not restarted any more: "
            "its thread died: SystemExit: a bug"
        )
        assert "the supervisor has stopped, so processes are not restarted any more" in as_lines(
            asdict(served.supervisor.report())
        )
        with pytest.raises(ScalingError, match="the supervisor has stopped"):
            served.supervisor.scale(expert_servers=3).result(60)
        inbox = served.supervisor._members.inbox
        while not inbox.empty():
            inbox.get_nowait()
        heard = [member.silent_seconds for member in served.supervisor.status()]
        served.until(lambda: served.supervisor.status()[0].silent_seconds > heard[0] + 0.5)
        assert inbox.empty(), "what the processes say would pile up"


@SLOW
def test_what_dies_when_nobody_watches_is_told(expected: list[Answer]) -> None:
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2) as served:
        assert processes_up(served) == {"attention worker": 2, "expert server": 2}
        unwatch(served)
        for name in ("attention worker 0", "expert server 1"):
            killing(served, name)()
        served.until(lambda: [one.stage for one in served.supervisor.status()].count("stopped") == 2)
        report = served.supervisor.report()
        assert [(one.name, one.pid is None, one.deaths, one.incarnation) for one in report.processes] == [
            ("attention worker 0", True, 1, 1),
            ("attention worker 1", False, 0, 1),
            ("expert server 0", False, 0, 1),
            ("expert server 1", True, 1, 1),
        ]
        assert processes_up(served) == {"attention worker": 1, "expert server": 1}
        assert report.counters.process_deaths == 2 and {layer.least for layer in report.replicas} == {1}
        assert sum("killed by signal 9" in what for what in failures(served)) == 2
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == expected
        noted = len(failures(served))
    assert len(failures(served)) == noted, "an end that was asked for is no failure"


@SLOW
def test_who_waits_to_be_restarted_when_the_watch_ends_is_stopped() -> None:
    with cluster(expert_servers=2, min_replicas=2) as served:
        member = served.supervisor._members.servers[0]
        member.deaths = [served.supervisor._clock()] * 3
        killing(served, "expert server 0")()
        served.until(lambda: served.supervisor.status()[1].stage == "waiting to be restarted")
        unwatch(served)
        assert served.supervisor.status()[1].stage == "stopped"


@SLOW
def test_a_change_under_way_ends_with_the_watch() -> None:
    with cluster() as served:
        future = served.supervisor.scale(expert_servers=3)
        served.until(lambda: served.supervisor.report().change is not None)
        unwatch(served)
        with pytest.raises(ScalingError, match="the supervisor has stopped"):
            future.result(60)
        assert served.supervisor.report().change is None


@SLOW
def test_without_any_worker_left_and_nobody_to_start_one_the_service_ends() -> None:
    with cluster(expert_servers=1) as served:
        unwatch(served)
        served.submit(*workload(1, TOKENS))
        with pytest.raises(ConnectionLost, match="attention worker 0 was the last attention worker"):
            served.finish(Plan((5, killing(served, "attention worker 0"))))
        # A look at the cluster's health may come first, and then also names what does not serve.
        assert served.supervisor.describe_end().endswith(
            "the supervisor has stopped, so processes are not restarted any more"
        )


@SLOW
def test_a_watch_that_ends_while_the_only_worker_is_away_ends_the_service() -> None:
    with cluster(expert_servers=1) as served:
        served.supervisor._watchdog.rule = RestartRule(max_deaths=1)
        served.supervisor._router.leave(0)
        doing(served, raising(SystemExit("a bug")))()
        with pytest.raises(ConnectionLost, match="the supervisor has stopped"):
            served.until(lambda: False)


@SLOW
def test_a_start_that_breaks_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cluster.placing.first_placement", lambda *_: 1 // 0)
    with pytest.raises(ConnectionLost, match="the supervisor: ZeroDivisionError"), cluster():
        pass


@SLOW
def test_a_process_that_cannot_be_started_now_is_started_later(
    expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def spawn(config: ExpertServerConfig) -> local.ChildProcess:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return local.spawn_server(config)

    with cluster(expert_servers=2) as served:
        monkeypatch.setattr("moesaic.cluster.launcher.spawn_server", spawn)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((60, killing(served, "expert server 0")))) == expected
        assert tries == 4
        reason = "no process can be started: Resource temporarily unavailable; it is tried again every 1 s"
        assert failures(served)[1:] == [f"expert server 0: {reason}"]


def test_redundant_experts_without_a_place_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for servers, redundant in ((2, 4), (2, 5), (1, 1)):
        scene, settings = Scene(servers), ClusterConfig(expert_servers=servers, redundant_experts=redundant)
        ChangeQueue(scene.members, scene.publisher, scene.router, settings, lambda: 0.0, print).set_layout(
            LAYOUT
        )
        scene.members.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "--redundant-experts: got 5; with --expert-servers 2 at most 4 have a place",
        "--redundant-experts: got 1; with --expert-servers 1 at most 0 have a place",
    ]


def test_a_change_that_breaks_is_not_done() -> None:
    scene, future = Scene(1), Future[None]()
    change_queue = ChangeQueue(
        scene.members, scene.publisher, scene.router, ClusterConfig(expert_servers=1), lambda: 0.0, print
    )

    def breaking() -> Any:
        yield
        raise KeyError("a bug")

    change_queue._queue.append(_QueuedChange("scaling", breaking(), future))
    change_queue.advance(0.0)
    with pytest.raises(KeyError):
        change_queue.advance(0.0)
    assert change_queue.change_description is None
    with pytest.raises(ScalingError, match="scaling failed: KeyError: 'a bug'"):
        future.result(0)
    change_queue.stop("the end")
    scene.members.stop()


def test_a_lost_server_does_not_wait_for_a_worker_that_loads() -> None:
    """And the worker is added when it is ready, or given up, whatever else changes."""
    scene = Scene(2)
    settings = ClusterConfig(expert_servers=2)
    change_queue = ChangeQueue(
        scene.members, scene.publisher, scene.router, settings, lambda: scene.now, print
    )
    change_queue.set_layout(LAYOUT)
    came: list[str] = []

    def loading() -> Any:
        while not came:
            yield

    change_queue._arriving.append(_QueuedChange("a worker joins", loading()))
    change_queue.advance(0.0)
    assert change_queue.change_description == "a worker joins"
    stays, gone = scene.members.servers
    gone.stage, gone.child = Stage.STOPPED, None
    change_queue.advance(0.0)
    assert change_queue.change_description == "expert server 1: gone"
    scene.holds(stays)
    change_queue.advance(0.0)
    scene.settle()
    change_queue.advance(0.0)
    assert scene.members.servers == [stays] and change_queue.change_description == "a worker joins"
    came.append("now")
    change_queue.advance(0.0)
    assert change_queue.change_description is None
    change_queue.stop("the end")
    scene.members.stop()


@pytest.mark.parametrize("capacity", [1.0, 5.0])
def test_copies_are_spread_once_hosts_are_known(capacity: float, caplog: pytest.LogCaptureFixture) -> None:
    """As on Ray: where a process is is known after the placement. And it is said what cannot be spread."""
    scene = Scene(4)
    settings = ClusterConfig(expert_servers=4, min_replicas=2, rebalance_interval=0.0)
    servers = scene.members.servers
    links = Links(scene.members, settings)
    change_queue = ChangeQueue(
        *(scene.members, scene.publisher, scene.router, settings, lambda: scene.now, print), links=links
    )
    change_queue.set_layout(LAYOUT)

    def begun() -> str | None:
        change_queue.advance(0.0)
        return change_queue.change_description

    for member in servers:
        member.capacity = capacity if member.number < 2 else 1.0
    load, capacities = np.ones((1, 4)), scene.members.capacities
    known = {2: "b", 3: "b"} if capacity > 1.0 else None  # else nothing is left to spread
    scene.publisher.placement = balance.place(load, (0,), capacities, min_replicas=2, hosts=known)
    assert begun() is None, "there is one host only"
    for member in servers[2:]:
        member.host, member.host_id = "10.0.0.2", "boot:7"
    servers[3].stage = Stage.STARTING
    assert begun() is None, "a process that starts may still be given another host"
    servers[3].stage = Stage.SERVING
    what = begun()
    hosts = links.server_hosts()
    if capacity == 1.0:
        assert what == "spreading copies over hosts"
        coming = scene.publisher.next_placement
        assert coming is not None and count_exposed(coming, range(4), hosts) == 0 and not caplog.text
    else:
        assert begun() is None and what is None
        assert caplog.text.count("experts have all of their copies on one host") == 1
    change_queue.stop("the end")
    scene.members.stop()
