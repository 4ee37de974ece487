"""Servers of different size: experts follow the capacity weights, and the bits stay."""

from __future__ import annotations

import queue
import socket
from typing import Any

import numpy as np
import pytest

from moesaic.cluster.balancing import Balancing
from moesaic.cluster.join_listener import JoinListener, RemoteProcess
from moesaic.cluster.member import Role
from moesaic.cluster.members import Members
from moesaic.cluster.placing import first_placement
from moesaic.cluster.router import Router
from moesaic.cluster.scaling import JoinedProcess
from moesaic.commands.options import Join
from moesaic.config import ClusterConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.policy.placement import balance
from moesaic.transport import acceptor
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Terms, prove_as_client
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.sealed_socket import wire
from moesaic.transport.stream import StreamConnection
from tests.cluster.test_balancing import LAYOUT, filled
from tests.cluster.test_changes import Scene, advance, spawning  # noqa: F401  a fixture
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_join_listener import joiner, newcomer
from tests.support.cluster_driver import Answer, Cluster, cluster

COUNT, TOKENS = 6, 48
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


def members_of(settings: ClusterConfig, threads: int | None = 3) -> Members:
    worker = WorkerConfig(ModelConfig("m", threads=threads))
    members = Members(worker, Router(), lambda member, message: None, lambda: 0.0, settings)
    for _ in range(settings.expert_servers):
        members.add(Role.SERVER)
    return members


# ---- weights


def test_worked_example() -> None:
    members = members_of(ClusterConfig(expert_servers=2, expert_capacities="2,0.5"))
    assert members.capacities == {0: 2.0, 1: 0.5}
    members.add(Role.SERVER)
    members.add(Role.SERVER, capacity=7.0)
    assert members.capacities == {0: 2.0, 1: 0.5, 2: 0.5, 3: 7.0}
    members.stop()


def test_by_default_all_have_their_threads() -> None:
    members = members_of(ClusterConfig(expert_servers=2))
    assert members.capacities == {0: 3.0, 1: 3.0}
    members.stop()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("2", "got '2'; allowed: 2 numbers, one for each of --expert-servers"),
        ("1,2,3", "2 numbers"),
        ("2,0", "got '0'; allowed: positive numbers"),
        ("2,-1", "got '-1'"),
        ("2,inf", "got 'inf'"),
        ("2,nan", "got 'nan'"),
        ("2,", "got ''"),
        ("two,1", "got 'two'"),
    ],
)
def test_weights_that_are_none_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--expert-capacities: .*{message}"):
        ClusterConfig(expert_servers=2, expert_capacities=given)


def test_without_servers_there_is_nothing_to_weigh() -> None:
    with pytest.raises(ConfigError, match="at least 1 with --expert-capacities"):
        ClusterConfig(expert_capacities="1")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_who_joins_says_a_positive_weight(weight: float) -> None:
    with pytest.raises(ConfigError, match="--capacity: got .*; allowed: a positive number"):
        Join("h:1", secret_file="f", capacity=weight)


# ---- what they decide


def test_the_first_placement_follows_them() -> None:
    settings = ClusterConfig(expert_servers=2, expert_capacities="3,1")
    placement = first_placement(LAYOUT, settings, {0: 3.0, 1: 1.0}, None)
    assert placement.experts_by_layer[0] == {0: (0, 1, 2), 1: (3,)}


def test_so_does_a_change(spawning: list[Scene]) -> None:  # noqa: F811
    """Servers of weight 1 or more and one of three times that: three quarters of four experts."""
    scene = Scene(1)
    spawning.append(scene)
    scene.members.servers[0].capacity = 2.0
    process = scene.process("expert server 1")
    process.capacity = 6.0
    change = scene.changes.add_server(JoinedProcess(process, "w"))  # type: ignore[arg-type]
    assert advance(change)
    [held] = scene.told_to_hold("expert server 1")
    assert len(held[0]) == 3


def test_balance_is_of_load_for_each_unit_of_capacity() -> None:
    """All four experts are asked alike: good for equal servers, not where one is three times the other."""
    load = [[50] * 4, [50] * 4]
    placement = balance.place(np.ones((2, 4)), (0, 1), {0: 1.0, 1: 1.0})
    settings = ClusterConfig(expert_servers=2, rebalance_interval=10.0)
    for weights, moved in (({0: 2.0, 1: 2.0}, False), ({0: 3.0, 1: 1.0}, True)):
        balancing = Balancing(LAYOUT, settings, 0.0)
        new = balancing.plan_rebalance(filled(balancing, load, share=0.5), placement, weights)
        assert (new is not None) == moved
    assert new is not None and new.experts_by_layer[0] == {0: (0, 1, 2), 1: (3,)}


# ---- real processes


def shares(served: Cluster) -> list[tuple[float, int]]:
    """Of each server: its weight, and the experts that it holds of each layer."""
    servers = [one for one in served.supervisor.status() if one.role == "expert server"]
    return [(one.capacity, one.experts // one.layers) for one in servers]


@pytest.mark.slow
def test_a_larger_server_holds_more_and_the_bits_are_the_same(expected: list[Answer]) -> None:
    with cluster(expert_servers=2, expert_capacities="2,1", attention_workers=2) as served:
        assert shares(served) == [(2.0, 16), (1.0, 8)]
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == expected


@pytest.mark.slow
def test_who_joins_gets_what_its_weight_is_worth(expected: list[Answer], door: dict[str, Any]) -> None:
    flags = ("--capacity", "3")
    with cluster(**door) as served, joiner(served, door["cluster_secret_file"], *flags):
        served.submit(*workload(COUNT, TOKENS))
        served.until(lambda: newcomer(served) is not None)
        assert shares(served) == [(1.0, 6), (3.0, 18)]
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish() == 2 * expected


# ---- the first word


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        messages.DirectorySettled(1),
        messages.Enlist("expert-server", 0.0),
        messages.Enlist("expert-server", float("inf")),
        messages.Enlist("expert-server", -2.0),
    ],
)
def test_whoever_says_something_else_first_is_dropped(
    word: messages.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcome: list[RemoteProcess] = []
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(acceptor._log, "warning", lambda line, *parts: lines.put(line % parts))
    join_listener = JoinListener("tcp:127.0.0.1:0", SECRET, welcome.append)
    peer = connected(join_listener.address)
    name = "tcp:{}:{}".format(*peer._socket._socket.getsockname())  # type: ignore[union-attr]
    try:
        peer.send(word)
        with pytest.raises(ConnectionLost):
            while True:  # until then there are signs of life
                peer.receive(20.0)
        what = f"it sent {type(word).__name__}, not Enlist with a positive capacity"
        assert lines.get(timeout=20.0) == f"dropped {name} at {join_listener.address}: {what}"
        assert welcome == [] and lines.empty()
    finally:
        peer.close()
        join_listener.close()


def connected(address: str) -> StreamConnection:
    """Past the handshake."""
    sock: socket.socket = addresses.dial(addresses.parse(address), 10.0)
    keys = prove_as_client(sock, SECRET, Terms("stream", MIN_HEAP), Deadline(10.0))
    return StreamConnection(wire(sock, keys))
