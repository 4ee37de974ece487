"""The client of expert servers, with servers and connections that the test turns by hand."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.experts import wire
from moesaic.experts.answer_check import AnswerCheck
from moesaic.experts.backend import CallPairs
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.outstanding import HostAnswers, PartialSumCall, Submission
from moesaic.experts.remote import RemoteExperts
from moesaic.experts.server import ExpertServer
from moesaic.kernels.reference.experts import put
from moesaic.policy.fleet.replicas import Replicas, ReplicaTimeout
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.transport.calls import Call, Caller
from moesaic.transport.listening import Listener, connect
from moesaic.transport.sockets import StreamAnswerer
from moesaic.transport.wakeup import Wakeup

SECRET = b"a secret of the tests"
EXPERTS, HIDDEN = 4, 3
LAYOUT = ExpertLayout({0: "a", 1: "b"}, "gate", "up", "down", HIDDEN, 2, EXPERTS, 2, "float32")
PATIENCE = 120.0
"""Seconds after which something hangs."""
EVERYTHING = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


class Scaling:
    """An Arithmetic: expert e of layer l multiplies by 10 l + e + 1."""

    name = "scaling"
    resident_experts = EVERYTHING

    def load(self, experts_by_layer: object) -> None: ...

    def keep_only(self, experts_by_layer: object) -> None: ...

    nan_for: Sequence[int] = ()
    """Experts whose answers are NaN."""

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        for part in parts:
            part.results[part.result_rows] = part.hidden[part.rows] * (10 * layer + part.experts[:, None] + 1)
            part.results[part.result_rows[np.isin(part.experts, self.nan_for)]] = np.nan


class Dialling:
    """A Connector without threads: what was started stands when the client looks."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup = wakeup
        self.wanted: list[ServerEntry] = []
        self.stopped: list[int] = []
        self.kept: list[tuple[ServerEntry, Caller]] = []
        self.kind, self.heap = "shm", 1 << 20

    def start(self, entry: ServerEntry, secret: bytes) -> None:
        self.wanted.append(entry)
        self.wakeup.ring()

    def stop(self, server: int) -> None:
        self.stopped.append(server)
        self.wanted = [entry for entry in self.wanted if entry.server != server]

    def dial(self) -> None:
        """The connections stand now, except to the dead; the client does not know yet."""
        wanted, self.wanted = self.wanted, []
        for entry in wanted:
            with contextlib.suppress(ConnectionLost):
                self.kept.append((entry, connect(entry.endpoint.address, SECRET, self.kind, self.heap)))

    def take_connections(self) -> list[tuple[ServerEntry, Caller]]:
        self.dial()
        kept, self.kept = self.kept, []
        return kept


class Cluster:
    """Two servers that hold everything, and a client."""

    def __init__(self, folder: Path, everyone: bool = False) -> None:
        self.experts = [Scaling(), Scaling()]
        self.nan_in_checkpoint: Sequence[int] = ()
        self.servers = [
            ExpertServer(
                LAYOUT,
                self.experts[number],
                Listener(f"unix:{folder}/{number}", SECRET),
                ExpertServerScheduler(LAYOUT.layers, MostTokensFirst(), EnoughPairs()),
                time.monotonic,
            )
            for number in range(2)
        ]
        self.entries = [ServerEntry(number, 1, Endpoint(f"unix:{folder}/{number}")) for number in range(2)]
        wakeup = Wakeup()
        self.connector = Dialling(wakeup)
        self.replicas = Replicas(ReplicaTimeout(unknown=1e9, floor=1e9))
        self.version = 0
        self.client = RemoteExperts(
            LAYOUT,
            self.replicas,
            self.connector,  # type: ignore[arg-type]
            wakeup,
            time.monotonic,
            every_server=everyone,
            check=AnswerCheck(lambda layer, expert, row: expert not in self.nan_in_checkpoint),
        )

    def publish(self, *servers: int, names: list[ServerEntry] | None = None) -> None:
        """These servers, from now on."""
        self.version += 1
        entries = [self.entries[server] for server in servers] if names is None else names
        held = dict.fromkeys(servers, EVERYTHING)
        self.client.update(Directory(self.version, entries, held), SECRET)

    def submit(self, layer: int = 0, rows: int = 3) -> tuple[RequestHandle, torch.Tensor]:
        """And what must come back."""
        hidden = torch.arange(rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN)
        ids = torch.tensor([[row % EXPERTS, (row + 1) % EXPERTS] for row in range(rows)])
        wanted = hidden[:, None] * (10 * layer + ids[:, :, None] + 1)
        return self.client.submit(ExpertRequest(layer, hidden, ids)), wanted

    def submit_summed(self, rows: int = 3) -> tuple[RequestHandle, torch.Tensor]:
        """Weights differ from pair to pair; what comes back must sum up to this."""
        hidden = torch.arange(rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN) / 8
        ids = torch.tensor([[row % EXPERTS, (row + 1) % EXPERTS] for row in range(rows)])
        weights = (torch.arange(2 * rows, dtype=torch.float32) + 1).reshape(rows, 2) / 4
        wanted = (weights[:, :, None] * hidden[:, None] * (ids[:, :, None] + 1)).sum(1)
        return self.client.submit(ExpertRequest(0, hidden, ids, weights=weights)), wanted

    def turn(self, *servers: int) -> None:
        for server in servers:
            self.servers[server].turn(0.001)

    def until(self, done: Callable[[], object], *servers: int) -> None:
        """Turn servers until something is so."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, "nothing happened"
            self.turn(*servers)

    def rows(self, handle: RequestHandle, *servers: int) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def done() -> bool:
            answer = self.client.poll(handle)
            found.extend([] if answer is None else [answer])
            return bool(found)

        self.until(done, *servers)
        return found[0]

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_rows_of_both_servers_are_put_at_their_pairs(cluster: Cluster) -> None:
    cluster.publish(0, 1)
    first, second = cluster.submit(), cluster.submit(1, rows=5)
    for handle, wanted in (second, first):
        torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0)
        cluster.client.release(handle)
    assert all(server.counters.pairs > 0 for server in cluster.servers)
    assert not cluster.client.is_busy and cluster.client.stats().resent_pairs == 0


def test_a_connection_that_stands_is_used_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own rank's server has connected since the client looked last: nothing goes to the other one."""
    cluster.replicas.own = 0
    cluster.publish(1)
    cluster.until(lambda: cluster.servers[1].clients, 1)
    cluster.client.arrivals()
    with monkeypatch.context() as slow:
        slow.setattr(cluster.connector, "take_connections", list)
        cluster.publish(0, 1)
    cluster.connector.wakeup.ring()
    handle, wanted = cluster.submit()
    torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0)
    assert [server.counters.pairs for server in cluster.servers] == [wanted.shape[0] * LAYOUT.top_k, 0]


def test_answers_hold_while_there_is_room(cluster: Cluster) -> None:
    """They may lie where they came in: other calls, and the end of the connection, leave them alone."""
    cluster.publish(0)
    kept = []
    for turn in range(6):
        handle, wanted = cluster.submit(turn % 2, rows=2 + turn)
        kept.append((handle, cluster.rows(handle, 0), wanted))
        if turn == 3:
            cluster.client.release(kept.pop(1)[0])
    cluster.publish(1)
    handle, wanted = cluster.submit()
    cluster.rows(handle, 1)
    assert list(cluster.client._connections) == [1]
    for handle, rows, wanted in kept:
        torch.testing.assert_close(rows, wanted, rtol=0, atol=0)
        cluster.client.release(handle)


def test_an_answer_takes_its_room_until_it_is_released(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.publish(0)
    cluster.until(lambda: cluster.servers[0].clients, 0)
    cluster.client.arrivals()
    caller, released = cluster.client._connections[0].caller, list[Call]()
    monkeypatch.setattr(caller, "release", released.append)
    handle, _ = cluster.submit()
    cluster.rows(handle, 0)
    assert not released and not cluster.client.is_busy
    cluster.client.release(handle)
    assert len(released) == 1


def test_nothing_keeps_what_was_released(cluster: Cluster) -> None:
    """Without the collector of cycles: large answers must not wait for it."""
    cluster.publish(0)
    gc.disable()
    try:
        handle, _ = cluster.submit()
        cluster.rows(handle, 0)
        kept = weakref.ref(cluster.client._submissions[handle.number])
        cluster.client.release(handle)
        assert kept() is None
    finally:
        gc.enable()


def test_a_question_without_rows_is_asked_of_everyone_and_waited_for(tmp_path: Path) -> None:
    """Also where one server holds everything."""
    cluster = Cluster(tmp_path, everyone=True)
    try:
        cluster.publish(0)
        cluster.until(lambda: cluster.servers[0].clients, 0)
        cluster.client.arrivals()
        ids = torch.zeros((0, 2), dtype=torch.int64)
        handle = cluster.client.submit(ExpertRequest(0, torch.zeros(0, HIDDEN), ids))
        assert cluster.client.is_busy and cluster.client.poll(handle) is None
        assert cluster.rows(handle, 0).shape == (0, 2, HIDDEN)
        cluster.client.release(handle)
        assert not cluster.client.is_busy and cluster.servers[0].counters.calls == 1
    finally:
        cluster.close()


@pytest.mark.parametrize("kind", ["shm", "stream"])
def test_answers_that_wait_make_room_for_questions(cluster: Cluster, kind: str) -> None:
    """A connection has room for two calls or so. Were answers to keep theirs, the third question would wait
    for ever: nobody looks at the first answer before."""
    cluster.connector.kind, cluster.connector.heap = kind, 4096
    cluster.publish(0)
    kept = []
    for turn in range(8):
        handle, wanted = cluster.submit(turn % 2, rows=20)
        kept.append((handle, cluster.rows(handle, 0), wanted))
    for handle, _, wanted in kept:
        torch.testing.assert_close(cluster.client.rows(handle), wanted, rtol=0, atol=0)
        cluster.client.release(handle)


def test_an_empty_call_leaves_the_answer_of_another_alone(tmp_path: Path) -> None:
    """With `everyone` the server that was asked for nothing answers too, before or after. Were the other's
    answer not given back, there would soon be no room."""
    cluster = Cluster(tmp_path, everyone=True)
    cluster.connector.heap = 4096
    try:
        held = {0: EVERYTHING, 1: {layer: [] for layer in LAYOUT.layers}}
        cluster.client.update(Directory(9, cluster.entries, held), SECRET)
        cluster.until(lambda: all(server.clients for server in cluster.servers), 0, 1)
        cluster.client.arrivals()
        for order in 5 * ((0, 1), (1, 0)):
            calls = cluster.servers[0].counters.calls
            handle, wanted = cluster.submit(rows=20)
            for server in order:
                served = cluster.servers[server].counters
                cluster.until(lambda s=served, c=calls: s.calls > c, server)
                cluster.client.poll(handle)
            torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0)
            cluster.client.release(handle)
            assert all(not end.calls for end in cluster.client._connections.values())
    finally:
        cluster.close()


def test_bytes_of_questions_and_answers_are_counted(cluster: Cluster) -> None:
    """A row goes to a server once and comes back for each of its pairs; no server is this client's own."""
    cluster.publish(1)
    handle, _ = cluster.submit(rows=5)
    cluster.rows(handle, 1)
    pairs, row = 5 * LAYOUT.top_k, 4 * HIDDEN
    assert cluster.client.stats().remote_bytes == wire.size(5, pairs, HIDDEN, False) + pairs * row
    cluster.client.release(handle)


def test_partial_sums_stand_at_their_first_pair(cluster: Cluster) -> None:
    """One server has both pairs of a row: one sum and zeros. Two have one each: a sum each."""
    cluster.publish(1)
    handle, wanted = cluster.submit_summed()
    found = cluster.rows(handle, 1)
    torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=0)
    assert not found[:, 1].any()
    cluster.client.release(handle)
    cluster.publish(0, 1)
    for rows in range(1, 8):
        handle, wanted = cluster.submit_summed(rows)
        torch.testing.assert_close(cluster.rows(handle, 0, 1).sum(1), wanted, rtol=0, atol=0)
        cluster.client.release(handle)
    assert all(server.counters.pairs > 0 for server in cluster.servers) and not cluster.client.is_busy


def test_partial_sums_survive_a_death(cluster: Cluster) -> None:
    cluster.publish(0, 1)
    cluster.until(lambda: cluster.servers[0].clients and cluster.servers[1].clients, 0, 1)
    cluster.client.arrivals()
    handle, wanted = cluster.submit_summed(6)
    cluster.servers[0].close()
    torch.testing.assert_close(cluster.rows(handle, 1).sum(1), wanted, rtol=0, atol=0)
    assert cluster.client.stats().resent_pairs > 0 and not cluster.client.is_busy


def test_a_sum_may_come_alone_and_twice() -> None:
    """Pairs 0 and 1 are row 0's, pairs 3 and 4 rows 1's and 2's: three sums."""
    hidden, gate_weights = np.ones((3, 1), np.float32), np.ones(6, np.float32)
    memory = HostAnswers(put)
    submission = Submission(RequestHandle(0), 0, hidden, np.zeros(6, np.int64), gate_weights, 2)
    out = submission.answer_memory(memory)
    out[:] = 9
    call = SimpleNamespace(answer=np.array([5, 6, 7], np.float32).tobytes())
    sent = PartialSumCall(submission, np.array([0, 1, 3, 4]), call, 1)  # type: ignore[arg-type]
    pairs, fresh = sent.receive(np.array([2]), memory)
    assert (pairs.tolist(), fresh, sent.num_missing, sent.missing_pairs.tolist()) == ([4], 1, 3, [0, 1, 3])
    pairs, fresh = sent.receive(np.array([0, 2]), memory)
    assert (pairs.tolist(), fresh, sent.num_missing) == ([0, 1, 4], 2, 1)
    pairs, fresh = sent.receive(np.array([1]), memory)
    assert (pairs.tolist(), fresh, sent.num_missing) == ([3], 1, 0)
    assert out[:, 0].tolist() == [5, 0, 9, 6, 7, 9]


def test_pairs_wait_for_the_first_server(cluster: Cluster) -> None:
    handle, wanted = cluster.submit()
    assert cluster.client.is_busy and cluster.client.poll(handle) is None
    cluster.publish(1)
    torch.testing.assert_close(cluster.rows(handle, 1), wanted, rtol=0, atol=0)


def test_a_dead_servers_pairs_go_to_the_other_one(cluster: Cluster) -> None:
    cluster.publish(0, 1)
    cluster.until(lambda: cluster.servers[0].clients and cluster.servers[1].clients, 0, 1)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    cluster.servers[0].close()
    torch.testing.assert_close(cluster.rows(handle, 1), wanted, rtol=0, atol=0)
    stats = cluster.client.stats()
    assert stats.failovers == 1 and stats.resent_pairs > 0 and stats.false_failovers == 0


def test_a_server_that_sends_garbage_is_dropped_with_one_line(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.connector.kind = "stream"
    cluster.publish(0, 1)
    cluster.until(lambda: cluster.servers[0].clients and cluster.servers[1].clients, 0, 1)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    [end] = cluster.servers[0]._ends.values()
    assert isinstance(end, StreamAnswerer)
    end._frames.push([memoryview(b"x" * 4096)])
    torch.testing.assert_close(cluster.rows(handle, 1), wanted, rtol=0, atol=0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("dropped expert server 0: the server sent a damaged frame")


@pytest.mark.parametrize("summed", [False, True], ids=["pairs", "partial sums"])
def test_a_server_that_answers_nan_is_given_up_by_name(
    cluster: Cluster, summed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another one answers in its place. It is asked again once another process has its id."""
    cluster.experts[0].nan_for = range(EXPERTS)
    cluster.publish(0, 1)
    cluster.until(lambda: cluster.servers[0].clients and cluster.servers[1].clients, 0, 1)
    cluster.client.arrivals()
    handle, wanted = cluster.submit_summed() if summed else cluster.submit()
    found = cluster.rows(handle, 0, 1)
    torch.testing.assert_close(found.sum(1) if summed else found, wanted, rtol=0, atol=0)
    [fault] = cluster.client.take_faulty_servers()
    assert (fault.server, fault.incarnation, cluster.client.take_faulty_servers()) == (0, 1, [])
    assert fault.reason.startswith("answered NaN or infinities for expert ")
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped expert server 0: it {fault.reason}"
    ]
    cluster.client.release(handle)
    cluster.client.arrivals()
    assert cluster.replicas.connected == {1}
    cluster.experts[0].nan_for = ()
    cluster.publish(0, 1, names=[replace(cluster.entries[0], incarnation=2), cluster.entries[1]])
    cluster.client.arrivals()
    assert cluster.replicas.connected == {0, 1}


def test_without_a_replica_rows_wait_for_the_next_process(cluster: Cluster) -> None:
    cluster.experts[0].nan_for = [1]
    cluster.publish(0)
    handle, wanted = cluster.submit()
    cluster.until(lambda: (cluster.client.arrivals(), cluster.client._faulty)[1], 0)
    assert cluster.client.poll(handle) is None
    cluster.experts[0].nan_for = ()
    cluster.publish(0, names=[replace(cluster.entries[0], incarnation=2)])
    torch.testing.assert_close(cluster.rows(handle, 0), wanted, rtol=0, atol=0)


def test_nan_of_the_model_is_nobodys_fault(cluster: Cluster) -> None:
    cluster.nan_in_checkpoint = [1]
    cluster.experts[0].nan_for = cluster.experts[1].nan_for = [1]
    cluster.publish(0, 1)
    handle, wanted = cluster.submit()
    wanted[0, 1] = wanted[1, 0] = torch.nan
    torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0, equal_nan=True)
    assert not cluster.client.take_faulty_servers() and cluster.client.stats().failovers == 0


def test_nan_that_a_server_was_sent_is_not_its_fault(cluster: Cluster) -> None:
    cluster.publish(0)
    hidden = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, 3.0]])
    ids = torch.tensor([[0, 1], [0, 1]])
    handle = cluster.client.submit(ExpertRequest(0, hidden, ids))
    wanted = hidden[:, None] * (ids[:, :, None] + 1)
    torch.testing.assert_close(cluster.rows(handle, 0), wanted, rtol=0, atol=0, equal_nan=True)
    assert not cluster.client.take_faulty_servers()


def test_a_request_takes_down_one_server_at_most(cluster: Cluster) -> None:
    """Where the check is wrong, as it might be for numbers at the edge of float32."""
    cluster.experts[0].nan_for = cluster.experts[1].nan_for = [1]
    cluster.publish(0, 1)
    handle, _ = cluster.submit()
    assert cluster.rows(handle, 0, 1).isnan().any()
    assert len(cluster.client.take_faulty_servers()) == 1


def test_a_server_that_leaves_answers_what_it_was_asked(cluster: Cluster) -> None:
    cluster.publish(0)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    cluster.publish(1)
    torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0)
    cluster.until(lambda: cluster.servers[0].clients == 0, 0)
    assert cluster.client.stats().failovers == 0


def test_a_server_that_leaves_is_asked_for_nothing_more(tmp_path: Path) -> None:
    """With `everyone`, an empty call would keep it from leaving."""
    cluster = Cluster(tmp_path, everyone=True)
    cluster.publish(0)
    cluster.client.arrivals()
    first, wanted = cluster.submit()
    cluster.publish(1)
    cluster.client.arrivals()
    second, _ = cluster.submit(1)
    torch.testing.assert_close(cluster.rows(first, 0), wanted, rtol=0, atol=0)
    assert cluster.servers[0].counters.calls == 1
    cluster.rows(second, 1)
    cluster.until(lambda: cluster.servers[0].clients == 0, 0)
    cluster.close()


def test_a_server_that_comes_back_before_it_has_left_loses_nothing(cluster: Cluster) -> None:
    """Its connection still stands, with a call on it."""
    cluster.publish(0)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    cluster.publish(1)
    cluster.publish(0)
    cluster.client.arrivals()
    torch.testing.assert_close(cluster.rows(handle, 0, 1), wanted, rtol=0, atol=0)
    assert cluster.servers[0].clients == 1


def test_a_successor_of_a_server_that_had_not_left(cluster: Cluster) -> None:
    """The call on the old connection goes to the new process."""
    cluster.publish(0)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    cluster.publish()
    cluster.publish(0, names=[ServerEntry(0, 2, cluster.entries[1].endpoint)])
    torch.testing.assert_close(cluster.rows(handle, 1), wanted, rtol=0, atol=0)


def test_a_second_connection_to_one_server_is_closed(cluster: Cluster) -> None:
    """Both stood before the client looked: it must not lose what it asks on the first."""
    cluster.publish(0)
    cluster.connector.dial()
    cluster.connector.start(cluster.entries[0], SECRET)
    cluster.client.arrivals()
    handle, wanted = cluster.submit()
    torch.testing.assert_close(cluster.rows(handle, 0), wanted, rtol=0, atol=0)
    cluster.until(lambda: cluster.servers[0].clients == 1, 0)


def test_a_directory_that_names_a_server_twice(cluster: Cluster) -> None:
    """The later line counts."""
    entry = cluster.entries[0]
    cluster.publish(0, names=[ServerEntry(0, 0, Endpoint("unix:/nowhere")), entry])
    handle, wanted = cluster.submit()
    torch.testing.assert_close(cluster.rows(handle, 0), wanted, rtol=0, atol=0)


def test_released_before_the_rows_came(cluster: Cluster) -> None:
    """Late rows are for nobody, also when some had come before: others may have the memory."""
    cluster.publish(0, 1)
    cluster.until(lambda: all(server.clients for server in cluster.servers), 0, 1)
    cluster.client.arrivals()
    for submit in (cluster.submit, cluster.submit_summed):
        handle = submit(rows=6)[0]
        calls = cluster.servers[0].counters.calls
        cluster.until(lambda calls=calls: cluster.servers[0].counters.calls > calls, 0)
        assert cluster.client.poll(handle) is None
        cluster.client.release(handle)
        other, wanted = cluster.submit(1, rows=6)
        torch.testing.assert_close(cluster.rows(other, 0, 1), wanted, rtol=0, atol=0)
        cluster.client.release(other)
        assert not cluster.client.is_busy


def test_a_call_without_pairs_is_no_work(tmp_path: Path) -> None:
    """With `everyone`, a server that is asked for nothing owes nothing, before its answer and after."""
    cluster = Cluster(tmp_path, everyone=True)
    try:
        cluster.publish(0, 1)
        cluster.client.arrivals()
        hidden, ids = torch.ones(1, HIDDEN), torch.zeros((1, 2), dtype=torch.int64)
        handle = cluster.client.submit(ExpertRequest(0, hidden, ids))
        assert cluster.rows(handle, 0, 1).tolist() == [[[1.0] * HIDDEN] * 2]
        assert [server.counters.calls for server in cluster.servers] == [1, 1]
        outstanding = [state.outstanding for state in cluster.replicas._servers.values()]
        assert outstanding == [0, 0]
    finally:
        cluster.close()
