"""Rows that go to a host once: the client's side and the relay's, over connections that the test drives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.relayed_servers import APART, HIDDEN, TOP_K, TWICE, FarHost

from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.relay import RelayedRequest
from moesaic.experts.relaying import open_calls

Make = Callable[..., FarHost]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FarHost] = []

    def begin(*settings: Any, met: bool = True) -> FarHost:
        made.append(FarHost(tmp_path, *settings))
        if met:
            made[-1].meet()
        return made[-1]

    yield begin
    for one in made:
        one.close()


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found = found if found.shape == wanted.shape else found.sum(1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def relayed(host: FarHost) -> int:
    """The relay of the one call that is under way."""
    [call] = open_calls(host.client._connections)
    return call.relay


@pytest.mark.parametrize("sums", [False, True])
def test_a_row_crosses_once_and_the_answers_are_those_of_direct_calls(make: Make, sums: bool) -> None:
    host = make()
    handle, wanted = host.submit(5, sums)
    relay = relayed(host)
    equal(host.answer(handle), wanted)
    pairs, answers = 5 * TOP_K, 5 if sums else 5 * TOP_K
    size = wire.size(5, pairs, HIDDEN, sums, parts=3) + answers * 4 * HIDDEN
    stats = host.client.stats()
    assert (stats.calls, stats.pairs, stats.far_bytes) == (1, pairs, size)
    assert relay == 1, "it has most pairs"
    assert [server.counters.calls for server in host.servers] == [1, 1, 1]
    assert sum(server.counters.pairs for server in host.servers) == pairs and not stats.resent_pairs
    assert not host.client.is_busy and not open_calls(host.client._connections)


class Published:
    """A call at the server's end, which keeps what it publishes."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def publish(self, indices: IntArray) -> None:
        self.rows += indices.tolist()


def request_of(servers: list[int], sums: bool) -> wire.Request:
    """One row with a pair for each of these servers."""
    pairs = len(servers)
    weights = np.ones(pairs, np.float32) if sums else None
    parts = tuple(wire.Part(server, 1) for server in servers)
    row = np.ones((1, HIDDEN), np.float32)
    experts, rows = np.arange(pairs), np.zeros(pairs, dtype=np.int64)
    return wire.Request(0, 0, experts, rows, weights, row, worker=7, parts=parts)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sums_are_added_in_the_order_of_the_servers(order: tuple[int, ...]) -> None:
    """Whichever is the relay, and whoever answers first. 1e8 + 3 rounds to 1e8, so the order shows."""
    answers = {4: 1e8, 5: 3.0, 9: -1e8}
    for servers in itertools.permutations(answers):
        end, answer = Published(), np.zeros((1, HIDDEN), np.float32)
        whole = RelayedRequest(end, request_of(list(servers), True), answer)  # type: ignore[arg-type]
        for index in order:
            part = whole.parts[index]
            part.answer[:] = answers[part.server]
            assert not end.rows
            part.publish(np.zeros(1, dtype=np.int64))
        assert end.rows == [0] and (answer == 0).all(), "(1e8 + 3) - 1e8 in float32"


def test_a_part_that_is_refused_twice_is_published_once() -> None:
    for sums in (False, True):
        end, answer = Published(), np.zeros((1 if sums else 3, HIDDEN), np.float32)
        whole = RelayedRequest(end, request_of([0, 1, 2], sums), answer)  # type: ignore[arg-type]
        for _ in range(2):
            whole.refuse(whole.parts[1])
        whole.parts[0].publish(np.zeros(1, dtype=np.int64))
        whole.parts[2].publish(np.zeros(1, dtype=np.int64))
        assert sorted(end.rows) == list(range(len(answer)))
        refused = (answer.view(np.uint32) == wire.NOT_COMPUTED).all(axis=1)
        assert refused.tolist() == ([True] if sums else [False, True, False])


def test_before_relays_have_met_rows_are_sent_directly(make: Make) -> None:
    """The relay says so at once. Its host then rests, and after that parts are sent."""
    host = make(met=False)
    handle, wanted = host.submit()
    equal(host.answer(handle), wanted)
    assert [server.counters.calls for server in host.servers] == [1, 1, 1]
    assert host.client.stats().calls == 3, "the call with parts, and two that are sent directly"
    handle, wanted = host.submit()
    assert not open_calls(host.client._connections), "the host rests"
    equal(host.answer(handle), wanted)
    host.meet()
    handle, wanted = host.submit()
    assert open_calls(host.client._connections)
    equal(host.answer(handle), wanted)


@pytest.mark.parametrize("sums", [False, True])
def test_a_relay_that_cannot_pass_on_says_so(make: Make, sums: bool) -> None:
    host = make(met=False)
    for connector in host.connectors:
        connector.reachable = False
    for _ in range(3):
        handle, wanted = host.submit(4, sums)
        equal(host.answer(handle), wanted)
        host.now += 2.0
    assert host.client.stats().failovers == 0 and host.client.stats().resent_pairs > 0


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_server_that_dies_costs_no_row(make: Make, dead: int, sums: bool) -> None:
    """The relay or a neighbour dies before anything is answered. Each expert has a copy elsewhere."""
    host = make(TWICE)
    handle, wanted = host.submit(6, sums)
    relay = relayed(host)
    host.turn(relay)  # it has passed on the parts
    host.kill(dead)
    equal(host.answer(handle), wanted)
    assert host.client._replicas.connected_servers == {0, 1, 2} - {dead} and not host.client.is_busy
    assert host.client.stats().resent_pairs and not host.client.stats().silent_failovers
    host.now += 5.0
    handle, wanted = host.submit(6, sums)
    equal(host.answer(handle), wanted)


@pytest.mark.parametrize("sums", [False, True])
def test_a_frozen_neighbour_is_given_up_as_without_relay(make: Make, sums: bool) -> None:
    host = make(TWICE)
    handle, wanted = host.submit(6, sums)
    relay = relayed(host)
    frozen = 2 if relay != 2 else 1
    others = sorted({0, 1, 2} - {frozen})
    host.until(lambda: host.servers[relay].counters.pairs, *others)
    for _ in range(20):
        host.until(lambda: True)
        host.turn(*others)
    host.now += 8.0  # three quarters of the timeout: the part is sent directly, to it or to another server
    host.client._progress()
    assert not open_calls(host.client._connections) and host.client.is_busy
    for _ in range(20):
        host.turn(*others)
        host.client._progress()
    host.now += 4.0
    host.client._progress()
    assert host.client._replicas.connected_servers >= set(others), "only it was given up"
    equal(host.answer(handle, *others), wanted)
    assert host.client.stats().silent_failovers <= 1


@pytest.mark.parametrize("sums", [False, True])
def test_a_frozen_relay_does_not_take_its_neighbours_along(make: Make, sums: bool) -> None:
    host = make(TWICE)
    handle, wanted = host.submit(6, sums)
    frozen = relayed(host)
    others = sorted({0, 1, 2} - {frozen})
    host.now += 8.0
    host.client._progress()
    host.until(lambda: all(host.servers[one].counters.pairs for one in others), *others)
    host.now += 4.0
    host.client._progress()
    assert host.client._replicas.connected_servers == set(others)
    equal(host.answer(handle, *others), wanted)
    assert host.client.stats().silent_failovers == 1


def test_what_comes_too_late_is_ignored(make: Make) -> None:
    """The relay was only slow. Its neighbour computes the part twice, and one answer counts."""
    host = make(TWICE)
    handle, wanted = host.submit(6)
    relay = relayed(host)
    host.now += 8.0
    host.client._progress()
    others = sorted({0, 1, 2} - {relay})
    host.until(lambda: all(host.servers[one].counters.pairs for one in others), *others)
    equal(host.answer(handle), wanted)
    for _ in range(10):
        host.turn()
        host.client._progress()
    assert not host.client.is_busy and not open_calls(host.client._connections)
    assert sum(server.counters.pairs for server in host.servers) > 6 * TOP_K
    host.now += 5.0
    handle, wanted = host.submit(6)
    assert relayed(host) == relay
    equal(host.answer(handle), wanted)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_server_of_a_wrong_answer_is_blamed(make: Make, wrong: int, sums: bool) -> None:
    host = make(TWICE)
    host.backends[wrong].nan_for = range(6)
    handle, wanted = host.submit(6, sums)
    assert relayed(host) in (0, 1, 2)
    equal(host.answer(handle), wanted)
    assert [one.server for one in host.client.take_faulty_servers()] == [wrong]


def test_two_relays_pass_to_each_other(make: Make) -> None:
    """Two clients, of which each has another relay. Only one server turns at a time."""
    host = make()
    other = host.connect()
    other._sender._relaying.groups = _through(2, other._sender._relaying.groups)  # type: ignore[method-assign]
    asked = [host.submit(4), host.submit(5, client=other)]
    assert [call.relay for one in host.clients for call in open_calls(one._connections)] == [1, 2]
    for _ in range(3):
        host.turn(1)
        host.turn(2)
    equal(host.answer(asked[0][0]), asked[0][1])
    equal(host.answer(asked[1][0], client=other), asked[1][1])


def _through(relay: int, groups: Callable[..., Any]) -> Callable[..., Any]:
    def first(*arguments: Any) -> Any:
        return [sorted(group, key=lambda share: share[0] != relay) for group in groups(*arguments)]

    return first


def test_a_client_that_goes_leaves_the_relay_in_order(make: Make) -> None:
    host = make()
    other = host.connect()
    host.submit(4, client=other)
    host.turn(0)
    other.close()
    host.clients.remove(other)
    handle, wanted = host.submit(4)
    equal(host.answer(handle), wanted)
    host.until(lambda: all(not one.calls for one in host.relays[0]._neighbours.values()))


def test_near_servers_are_asked_directly(make: Make) -> None:
    host = make(APART, "12")
    handle, wanted = host.submit(5)
    assert relayed(host) in (1, 2)
    assert [len(one.calls) for _, one in sorted(host.client._connections.items())] == [1, 1, 1]
    equal(host.answer(handle), wanted)
    assert host.client.stats().calls == 2


def test_one_far_server_has_no_relay(make: Make) -> None:
    host = make(APART, "2")
    handle, wanted = host.submit(5)
    assert not open_calls(host.client._connections)
    equal(host.answer(handle), wanted)


def test_relays_are_no_clients(make: Make) -> None:
    """A barrier does not wait for them, and nor does a run."""
    host = make()
    assert [server.clients for server in host.servers] == [1, 1, 1]
    host.client.enter_barrier(True)
    host.until(host.client.poll_barrier)
