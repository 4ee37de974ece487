"""What the supervisor does with members of other hosts that are silent, whose silence the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.member import Role, Stage
from moesaic.cluster.suspicion import Suspicion
from moesaic.transport.stream import StreamConnection
from tests.cluster.test_changes import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Two expert servers. The second one is on another host."""
    made = Scene(2)
    far = made.members.servers[1]
    assert far.child is not None
    far.child.stop()
    far.is_external = True
    far.child = RemoteProcess(
        cast("StreamConnection", SimpleNamespace(silence=0.0, close=lambda: None)), "10.0.0.2:5"
    )
    yield made
    far.child = None
    made.members.stop()


def silent(scene: Scene, seconds: float) -> str | None:
    """What is said when the server of the other host was silent for so long at 100 s."""
    far = scene.members.servers[1]
    assert isinstance(far.child, RemoteProcess)
    far.child.connection.silence = seconds  # type: ignore[misc]
    return Suspicion(scene.publisher, scene.router).look(far, 100.0)


def test_clients_are_told_of_each_suspicion_and_of_its_end(scene: Scene) -> None:
    scene.directories()
    assert silent(scene, 0.8) is None and scene.directories() == []
    assert silent(scene, 1.2) is None
    assert [directory.suspected_servers for directory in scene.directories()] == [[1]]
    assert silent(scene, 1.4) is None and scene.directories() == [], "it is told once"
    assert silent(scene, 0.0) is None
    assert [directory.suspected_servers for directory in scene.directories()] == [[]]
    assert scene.members.servers[1].last_seen == 100.0


def test_a_server_is_given_up_once(scene: Scene) -> None:
    said = silent(scene, 2.2)
    assert said == "expert server 1 sent nothing for 2.2 s: giving it up"
    child = scene.members.servers[1].child
    assert child is not None
    child.kill()
    assert silent(scene, 2.4) is None


def test_a_process_that_loads_has_more_time(scene: Scene) -> None:
    scene.members.servers[1].stage = Stage.STARTING
    assert silent(scene, 5.0) is None and not scene.members.servers[1].is_suspected


def test_processes_of_this_host_are_not_judged_here(scene: Scene) -> None:
    near = scene.members.servers[0]
    near.last_seen = 0.0
    assert Suspicion(scene.publisher, scene.router).look(near, 100.0) is None
    assert near.role is Role.SERVER and near.last_seen == 0.0
