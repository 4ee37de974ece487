"""The first placement of a standby waits for its servers, and leaves them what they have in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from moesaic.cluster import joined_launcher
from moesaic.cluster.join_listener import RemoteProcess
from moesaic.cluster.joined_launcher import JoinedLauncher
from moesaic.cluster.links import Links
from moesaic.cluster.member import Member, Role
from moesaic.cluster.members import Members
from moesaic.cluster.placing import FirstPlacement
from moesaic.cluster.publishing import Publisher
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig
from moesaic.core import messages
from tests.cluster.test_changes import LAYOUT
from tests.cluster.test_joined_launcher import DOOR, WORKER, Line
from tests.support.hosts import soon

STANDBY: dict[str, Any] = {"standby_for": "tcp:10.0.0.1:7000", "expert_servers": 2, **DOOR}


@dataclass
class Scene:
    """A standby with two places for servers."""

    settings: ClusterConfig

    def __post_init__(self) -> None:
        self.launcher = JoinedLauncher(WORKER)
        told = lambda member, message: None  # noqa: E731
        self.members = Members(WORKER, Router(), told, lambda: 0.0, self.settings, self.launcher)
        self.publisher, links = Publisher(self.members, b"s" * 32), Links(self.members, self.settings)
        self.first = FirstPlacement(self.members, self.publisher, links, self.settings, None)
        for _ in range(2):
            self.members.add(Role.SERVER)
        self.members.begin(None)

    def spawn(self) -> None:
        for member in self.members.servers:
            self.members.spawn_server(member, LAYOUT)
            self.publisher.hold(member)

    def call(self, kept: dict[int, list[int]], capacity: float = 1.0) -> Member:
        """A server calls. Returns the member whose place it gets."""
        process = RemoteProcess(Line(), "10.0.0.3:5", Role.SERVER, capacity, resident_experts=kept)  # type: ignore[arg-type]
        assert self.launcher.take(process)

        def place() -> Member | None:
            taken = [one for one in self.members.servers if getattr(one.child, "peer", None) is process]
            return taken[0] if taken else None

        soon(place)
        found = place()
        assert found is not None
        return found


@pytest.fixture
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(joined_launcher.fingerprint, "compute_fingerprint", lambda path: "w")
    made = Scene(ClusterConfig(**STANDBY | getattr(request, "param", {})))
    yield made
    for member in made.members.servers:
        assert member.child is not None
        member.child.kill()


def held(member: Member) -> list[dict[int, list[int]]]:
    """The experts of each Hold that a server was sent."""
    peer = member.child.peer  # type: ignore[union-attr]
    return [one.experts for one in peer.connection.told if isinstance(one, messages.Hold)]


def test_it_waits_for_every_server_and_then_loads_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.first.look()
    scene.first.set_layout(LAYOUT)
    scene.spawn()
    one = scene.call({0: [1, 2]})
    scene.first.look()
    assert scene.publisher.placement is None and held(one) == [], "it would drop what it has"
    other = scene.call({0: [0, 3]})
    scene.first.look()
    assert (held(one), held(other)) == ([{0: [1, 2]}], [{0: [0, 3]}])
    scene.first.look()
    assert len(held(one)) == 1
    assert "the servers have 4 of 4 copies of experts in memory" in caplog.text


@pytest.mark.parametrize(("scene", "share"), [({}, 3), ({"expert_capacities": "1,1"}, 2)], indirect=["scene"])
def test_shares_follow_what_servers_say_unless_settings_do(scene: Scene, share: int) -> None:
    scene.first.set_layout(LAYOUT)
    scene.spawn()
    large, _ = scene.call({}, capacity=6.0), scene.call({}, capacity=2.0)
    scene.first.look()
    [experts] = held(large)
    assert len(experts[0]) == share
