"""What becomes of a process that a user kills: one of this host, of a launcher, or one that joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.launched_process import LaunchedProcess
from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.supervisor import kill_member
from moesaic.core.errors import ConfigError, ScalingError
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_join_workers import joined, steps_of, worker
from tests.support.cluster_driver import cluster

NAME = "expert server 1"


@dataclass
class Child:
    """A process, or a connection, that counts how often it was ended."""

    ended: list[str] = field(default_factory=list)

    def kill(self) -> None:
        self.ended.append("kill")

    close = kill


class Launched(LaunchedProcess):
    """A process of a launcher that counts how often it was killed."""

    def __init__(self) -> None:
        self.ended = 0

    def kill(self) -> None:
        self.ended += 1


def member(process: object, **fields: Any) -> Member:
    given: dict[str, Any] = {"child": process, "stage": Stage.SERVING}
    return Member(Role.SERVER, 1, **given | fields)


def killed(one: Member, now: float = 100.0) -> str:
    return kill_member([Member(Role.WORKER, 0), one], one.name, now, RestartRule())


def test_a_process_of_this_host_is_killed_and_started_again() -> None:
    child = Child()
    assert killed(member(child)) == f"{NAME} was killed; it is started again"
    assert child.ended == ["kill"]
    left = killed(member(child, stage=Stage.DRAINING))
    assert left == f"{NAME} was killed; it is not started again, as it was leaving"


def test_a_process_that_a_launcher_started_is_killed_on_its_host() -> None:
    child = Launched()
    said = killed(member(child, has_tcp_connection=True, host="10.0.0.2"))
    assert said == f"{NAME} on 10.0.0.2 was killed; it is started again" and child.ended == 1


def test_a_process_that_joined_is_disconnected() -> None:
    connection = Child()
    child = RemoteProcess(cast("Any", connection), "10.0.0.2:5")
    far = member(child, has_tcp_connection=True, is_external=True, host="10.0.0.2", deaths=[99.0] * 9)
    assert killed(far) == (
        f"the connection to {NAME} on 10.0.0.2 was closed; the process joins again as a new one"
    )
    assert child.is_killed and connection.ended == ["kill"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"child": None, "stage": Stage.WAITING},
            f"{NAME} has no process now: it is waiting to be restarted",
        ),
        ({"deaths": [99.0] * 5}, f"{NAME} died 5 times within 60 s; one more death could end the service"),
        ({"is_external": True, "stage": Stage.STARTING}, f"{NAME} does not serve yet: it is starting"),
    ],
)
def test_what_cannot_be_killed_now(fields: dict[str, Any], message: str) -> None:
    child = Child()
    with pytest.raises(ScalingError, match=message) as refused:
        killed(member(child, **fields))
    assert refused.value.conflict and not child.ended


def test_a_wrong_name_is_told_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match="name: got 'x'; allowed: attention worker 0, expert server 1"):
        kill_member([Member(Role.WORKER, 0), member(Child())], "x", 0.0, RestartRule())


@pytest.mark.slow
def test_a_worker_that_joined_is_killed_and_comes_back(door: dict[str, Any]) -> None:
    """Its requests go on at the others with the same tokens, and the command joins again."""
    requests = workload(6, 48)
    with cluster(**door | {"expert_servers": 1}) as served, worker(served, door) as process:
        served.until(lambda: joined(served) is not None)
        first = joined(served)
        assert first is not None
        served.submit(*requests)
        served.until(lambda: steps_of(served, first.name) > 9)
        assert "joins again" in served.supervisor.kill(first.name)
        served.until(lambda: (joined(served) or first).number > first.number)
        assert served.finish() == alone(*requests)
        assert process.poll() is None and served.supervisor.report().counters.process_deaths == 1
