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
import pytest

from moesaic.cluster import local
from moesaic.cluster.steering import Steering, _Wanted
from moesaic.commands.processes import as_lines
from moesaic.config import ClusterConfig, ExpertServerConfig
from moesaic.core.errors import ConnectionLost, ScalingError
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.service import Service
from tests.cluster.driven import Answer, Cluster, cluster
from tests.cluster.test_changes import Scene
from tests.cluster.test_failures import raising
from tests.cluster.test_identity import alone, workload

COUNT, TOKENS = 4, 48
SLOW = pytest.mark.slow
DYING = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The supervisor's thread ends by an exception, as it is meant to."""


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
    """Let the supervisor's thread die."""
    doing(served, raising(SystemExit("a bug")))()
    served.until(lambda: not served.supervisor.report().watched)


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


@DYING
@SLOW
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_go_on_when_nobody_watches(schedule: str, expected: list[Answer]) -> None:
    with cluster(attention_workers=2, expert_servers=2, min_replicas=2, schedule=schedule) as served:
        pids = [member.pid for member in served.supervisor.status()]
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((20, doing(served, raising(SystemExit("a bug")))))) == expected
        served.until(lambda: not served.supervisor.report().watched)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((5 * TOKENS, killing(served, "expert server 0")))) == 2 * expected
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((9 * TOKENS, killing(served, "attention worker 0")))) == 3 * expected
        assert served.supervisor.report().counters.moved_requests > 0
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@SLOW
@DYING
def test_that_nobody_watches_is_told() -> None:
    with cluster() as served:
        assert status_over_http(served)["watched"]
        unwatch(served)
        status = status_over_http(served)
        assert not status["watched"] and len(status["processes"]) == 3
        [failure] = status["failures"]
        assert failure["what"] == (
            "the supervisor ended, nobody watches the processes any more: SystemExit: a bug"
        )
        assert "nobody watches the processes any more: what dies now stays dead" in as_lines(
            asdict(served.supervisor.report())
        )
        with pytest.raises(ScalingError, match="nobody watches"):
            served.supervisor.scale(expert_servers=3).result(10)
        inbox = served.supervisor._members.inbox
        while not inbox.empty():
            inbox.get_nowait()
        heard = [member.silent_seconds for member in served.supervisor.status()]
        served.until(lambda: served.supervisor.status()[0].silent_seconds > heard[0] + 0.5)
        assert inbox.empty(), "what the processes say would pile up"


@SLOW
@DYING
def test_a_change_under_way_ends_with_the_watch() -> None:
    with cluster() as served:
        future = served.supervisor.scale(expert_servers=3)
        served.until(lambda: served.supervisor.report().change is not None)
        unwatch(served)
        with pytest.raises(ScalingError, match="nobody watches"):
            future.result(10)
        assert served.supervisor.report().change is None


@SLOW
@DYING
def test_without_any_worker_left_and_nobody_to_start_one_the_service_ends() -> None:
    with cluster(expert_servers=1) as served:
        unwatch(served)
        served.submit(*workload(1, TOKENS))
        with pytest.raises(ConnectionLost, match="attention worker 0 was the last one"):
            served.finish(Plan((5, killing(served, "attention worker 0"))))
        assert served.supervisor.how_it_ended() == "nobody watches the processes any more"


@SLOW
@DYING
def test_a_watch_that_ends_while_the_only_worker_is_away_ends_the_service() -> None:
    with cluster(expert_servers=1) as served:
        served.supervisor._router.leave(0)
        doing(served, raising(SystemExit("a bug")))()
        with pytest.raises(ConnectionLost, match="nobody watches"):
            served.until(lambda: False)


@SLOW
def test_a_start_that_breaks_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.cluster.supervisor.first_placement", lambda *_: 1 // 0)
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
        monkeypatch.setattr("moesaic.cluster.members.spawn_server", spawn)
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(Plan((60, killing(served, "expert server 0")))) == expected
        assert tries == 4
        assert failures(served)[1:] == [
            "the supervisor: BlockingIOError: [Errno 11] Resource temporarily unavailable"
        ]


def test_a_change_that_breaks_is_not_done() -> None:
    scene, future = Scene(1), Future[None]()
    steering = Steering(
        scene.members, scene.publisher, scene.router, ClusterConfig(expert_servers=1), lambda: 0.0, print
    )

    def breaking() -> Any:
        yield
        raise KeyError("a bug")

    steering._queue.append(_Wanted("scaling", breaking(), future))
    steering.advance(0.0)
    with pytest.raises(KeyError):
        steering.advance(0.0)
    assert steering.under_way is None
    with pytest.raises(ScalingError, match="scaling broke off: KeyError: 'a bug'"):
        future.result(0)
    steering.stop("the end")
    scene.members.stop()
