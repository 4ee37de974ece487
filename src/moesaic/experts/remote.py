"""Routed experts on servers: sends requests, combines the answers, and replaces servers that are gone.

The (row, slot) pairs of a request are split by server (`policy.fleet.replicas`). A row travels once to each
server that it needs. Answers are stored at their pairs, so the rows are those of a direct call, whichever
server answered first. Pairs that no server can take wait for one that can.

Question: Who sends rows to expert servers again, and puts answers together?
Question: What happens when an expert server dies?
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np
import torch

from moesaic.config import RelayUse
from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.messages import FaultyServer, JoinJob
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import IntArray
from moesaic.experts.answer_check import Check, WrongAnswer
from moesaic.experts.barrier_client import BarrierClient
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.connector import Connector
from moesaic.experts.observer import ClientObserver, RouteObserver, UnobservedClient
from moesaic.experts.outstanding import (
    CallCounts,
    OpenCall,
    ServerConnection,
    Submission,
    every_pair,
)
from moesaic.experts.posting import Arrivals, Sender
from moesaic.experts.relaying import Relaying, open_calls
from moesaic.experts.worker_memory import HostWorkerMemory, WorkerMemory
from moesaic.kernels.reference.experts import put
from moesaic.kernels.table import Put
from moesaic.policy.fleet.relays import find_awaited_servers, needing
from moesaic.policy.fleet.replicas import Replicas
from moesaic.transport.calls import Caller
from moesaic.transport.waiting import wait, yield_core
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
SPIN = 50e-6
"""Seconds that the process polls for an answer before it sleeps."""
NO_PAIRS: IntArray = np.zeros(0, dtype=np.int64)


class RemoteExperts:
    """`RoutedExperts` and `ExpertServers` over connections to expert servers. Used by one thread.

    How a server leaves:

    | event | Replicas | here |
    |---|---|---|
    | its connection breaks, or it sends a damaged message | remove_server | _fail |
    | it answers NaN where the checkpoint gives finite numbers | remove_server | _blame |
    | it makes no progress for too long, and others hold its experts | mask, then remove_server | _fail |
    | another process has its id now | record_replacement, then remove_server | _fail |
    | it left the directory and has answered its calls | remove_server | _retire |

    `_fail` and `_retire` close the connection by `_drop`, which calls `Replicas.remove_server`. `_fail`
    also connects
    again and sends the unanswered pairs to other servers. `_blame` fails a server, never connects to that
    process again, and keeps a report for the supervisor.
    """

    job_id = b""
    routes: RouteObserver | None = None
    """Who wants to know which server answers for which pair."""
    report_other_calls: Callable[[], None] = staticmethod(lambda: None)
    """Reports to `Replicas` the calls that other clients of the same worker sent, and their answers.

    It is called just before deadlines are checked. Calls of graphs do not go through this object, and a
    server that answers those is not late.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        replicas: Replicas,
        connector: Connector,
        wakeup: Wakeup,
        clock: Callable[[], float],
        portion_rows: int | None = None,
        every_server: bool = False,
        put: Put = put,
        observer: ClientObserver | None = None,
        check: Check = lambda call, indices: None,
        relay: RelayUse = "off",
        memory: WorkerMemory | None = None,
    ) -> None:
        """wakeup: the one that `connector` rings. put: copies rows of answers.
        check: of every part of an answer. relay: whether one server of a host passes rows on to others of it.
        memory: has the rows, with connections that it wrapped. None: rows go through the host.

        portion_rows: keep what comes in for `arrivals`. Requests of more rows are reported portion by
        portion, others when their answer is complete. None: `arrivals` is not used.
        every_server: each request calls every server. Servers without any of its experts get an empty call
        (for the barrier schedule).
        """
        self._layout = layout
        self._observer: ClientObserver = UnobservedClient() if observer is None else observer
        self._arrivals = Arrivals(portion_rows)
        self._every_server = every_server
        self._replicas = replicas
        self._connector = connector
        self.wakeup = self._wakeup = wakeup
        self._clock, self._secret, self._waiting_seconds = clock, b"", 0.0
        self._entries: dict[int, ServerEntry] = {}
        """The servers of the directory."""
        self._connections: dict[int, ServerConnection] = {}
        """Server -> its connection. One that left the directory stays until it has answered."""
        self._submissions: dict[int, Submission] = {}
        """The requests that were not released, by the number of the handle."""
        self._num_submitted = 0
        self.memory: WorkerMemory = HostWorkerMemory(put) if memory is None else memory
        self._answers, self._check = self.memory.answers, check
        self._blamed_servers: set[ServerEntry] = set()
        """Processes that gave wrong answers."""
        self._faulty: list[FaultyServer] = []
        """Reports that `faulty` has not returned yet."""
        self._counts = CallCounts(layout.layers, replicas)
        self.worker = int.from_bytes(os.urandom(4)) | 1  # the number by which servers know this client
        self._barrier_client = BarrierClient(layout.hidden, self.worker)
        servers = replicas, self._connections, Relaying(relay, replicas, 4 * layout.hidden, self.worker)
        self._sender = Sender(*servers, self._counts, clock, self.worker, self._make_room)

    # ---- RoutedExperts

    def submit(self, request: ExpertRequest) -> RequestHandle:
        began = self._clock()
        handle, self._num_submitted = RequestHandle(self._num_submitted), self._num_submitted + 1
        pairs = self.memory.arrays(request)
        submission = Submission(
            handle, request.layer, pairs.hidden, pairs.experts, pairs.weights, pairs.top_k, place=pairs.place
        )
        self._submissions[handle.number] = submission
        if self.routes is not None:
            submission.servers = np.full(len(pairs.experts), -1)
            self.routes.on_rows_sent(request.layer, pairs.experts, submission.servers)
        if self._wakeup.rung:  # a connection is ready, perhaps to the own rank's server
            self._progress()
        self._sender.send(submission, every_pair(len(pairs.experts), pairs.top_k)[0])
        if self._every_server:
            self._sender.send_empty(submission, self._connections.keys() & self._entries.keys())
        yield_core()
        self._observer.on_request_sent(handle, request, began)
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        began = self._clock()
        submission = self._submissions[handle.number]
        if submission.num_missing:
            self._progress()
        if submission.num_missing:
            return None
        rows = self.rows(handle)
        self._observer.on_answer(handle, began)
        return rows

    def release(self, handle: RequestHandle) -> None:
        submission = self._submissions.pop(handle.number)
        submission.release()
        if submission.place is not None:
            self.memory.give_back(submission.place)
        self._observer.on_answer_released(handle)

    # ---- requests of which parts are used

    def arrivals(self) -> list[tuple[RequestHandle, IntArray]]:
        """The pairs (row * k + slot) that came in since the last call, by request."""
        began = self._clock()
        self._progress()
        arrivals = self._arrivals.take()
        self._observer.on_pairs_received(arrivals, began)
        return arrivals

    def rows(self, handle: RequestHandle) -> torch.Tensor:
        """The answer [n, k, h] as far as it has come in. It holds until the next call."""
        submission = self._submissions[handle.number]
        answer = submission.answer_memory(self._answers)
        rows = answer if isinstance(answer, torch.Tensor) else torch.from_numpy(answer)
        return rows.view(-1, submission.top_k, answer.shape[1])

    @property
    def is_busy(self) -> bool:
        """True while an answer or the barrier is awaited, or `arrivals` has not returned everything."""
        waiting = self._barrier_client.is_waiting or bool(self._arrivals)
        return waiting or any(submission.num_missing for submission in self._submissions.values())

    @property
    def connected_servers(self) -> dict[int, ServerEntry]:
        """The servers that are connected, also those that left the directory."""
        return {server: connection.entry for server, connection in self._connections.items()}

    # ---- ExpertServers

    @property
    def oldest_version_in_use(self) -> int:
        calls = (call for connection in self._connections.values() for call in connection.calls.values())
        return min((call.version for call in calls), default=self._sender.version)

    def update(self, directory: Directory, secret: bytes) -> None:
        previous_entries, self._entries = self._entries, {entry.server: entry for entry in directory.servers}
        self._secret, self._sender.version = secret, directory.version
        self._replicas.place(
            directory.experts, self._layout.num_experts, directory.suspected_servers, directory.ways
        )
        for server in set(previous_entries) - set(self._entries):
            self._connector.stop(server)
        for server, entry in self._entries.items():
            connection = self._connections.get(server)  # also where it had left and has calls to answer
            if (previous_entries.get(server, entry) if connection is None else connection.entry) != entry:
                self._replicas.record_replacement(server)
                self._fail(server)
            elif server not in previous_entries and connection is None:
                self._connector.start(entry, secret)
        self._retire()
        self._progress()

    def meet(self, place: JoinJob) -> None:
        """Rows of these requests do not go through a job."""

    def take_faulty_servers(self) -> list[FaultyServer]:
        faulty, self._faulty = self._faulty, []
        return faulty

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Sleep until an answer, a new connection, the file descriptor `wakeup`, or a server's deadline."""
        began = self._clock()
        slow = self._replicas.next_slow(find_awaited_servers(open_calls(self._connections)))
        deadlines = [one for one in (self._replicas.next_deadline(), slow) if one is not None]
        limits = [max(0.001, one - began) for one in deadlines] + ([] if timeout is None else [timeout])
        callers = [connection.caller for connection in self._connections.values()]
        news = wait(callers, (wakeup, self._wakeup.fileno()), min(limits, default=None), SPIN)
        # A worker without requests waits for clients. That is no waiting for experts.
        if not self._barrier_client.is_idle:
            self._waiting_seconds += self._clock() - began
        self._observer.on_wait(began)
        return news

    def enter_barrier(self, work: bool) -> None:
        self._barrier_client.enter(work)
        self._observer.on_barrier(work)

    def poll_barrier(self) -> bool:
        if not self._barrier_client.is_waiting:
            return False
        self._progress()
        has_passed = self._barrier_client.poll()
        if has_passed:
            self._observer.on_barrier(False)
        return has_passed

    def stats(self) -> ExpertStats:
        """What this client has counted since it started."""
        return self._counts.stats(self._waiting_seconds, self._replicas.stats)

    def close(self) -> None:
        """Close all connections, and `wakeup`."""
        for server in list(self._entries):
            self._connector.stop(server)
        for _, caller in self._connector.take_connections():
            caller.close()
        for connection in self._connections.values():
            connection.caller.close()
        self._connections.clear()
        self.memory.close()
        self._wakeup.close()

    # ---- calls

    def _progress(self) -> None:
        """Do everything that can be done without waiting."""
        if self._wakeup.rung:
            self._wakeup.clear()
            for entry, caller in self._connector.take_connections():
                self._join(entry, caller)
        for server, connection in list(self._connections.items()):
            try:
                for call, indices in connection.caller.poll():
                    if call.number in connection.calls:
                        self._receive(connection, connection.calls[call.number], indices)
                    elif call.number in connection.relayed_calls:
                        self._receive_parts(connection, call.number, indices)
                    else:
                        self._barrier_client.on_answer(connection, call)
            except DamagedMessage as damage:
                LOG.warning("dropped expert server %d: %s", server, damage)
                self._fail(server)
            except WrongAnswer as wrong:
                self._blame(connection.entry, str(wrong))
            except ConnectionLost:
                self._fail(server)
        now, relayed_calls = self._clock(), open_calls(self._connections)
        for server in self._replicas.slow(find_awaited_servers(relayed_calls), now) if relayed_calls else ():
            self._sender.take_back([part for one in relayed_calls for part in needing(one, server)])
        self.report_other_calls()
        for server in self._replicas.late(now):
            self._replicas.mask(server)
            self._fail(server)
        self._sender.retry()
        self.memory.poll()
        listed_connections = [one for server, one in self._connections.items() if server in self._entries]
        self._barrier_client.arrive(listed_connections)

    def _join(self, entry: ServerEntry, caller: Caller) -> None:
        if self._entries.get(entry.server) != entry or entry.server in self._connections:
            caller.close()
            return
        self._connections[entry.server] = ServerConnection(entry, caller)
        self._replicas.add_server(entry.server)

    def _receive(self, connection: ServerConnection, call: OpenCall, indices: IntArray) -> None:
        submission, server = call.submission, connection.entry.server
        wrong = self._check(call, indices)
        if wrong is not None:
            raise WrongAnswer(wrong)
        pairs, fresh = call.receive(indices, self._answers)
        submission.num_missing -= fresh
        if submission.servers is not None:
            submission.servers[pairs] = server
        self._arrivals.add(submission, pairs, fresh)
        self._replicas.record_answer(server, fresh, self._clock())
        if not call.num_missing:
            del connection.calls[call.call.number]
            call.complete(connection.caller.release)
            if server not in self._entries:
                self._retire()

    def _receive_parts(self, relay: ServerConnection, number: int, indices: IntArray) -> None:
        """Rows of a call with parts came in. A wrong answer is that of the part's server."""
        relayed_call = relay.relayed_calls[number]
        for part, rows in relayed_call.split_rows(indices):
            if not part.is_live:
                continue  # it was taken back with the part before
            connection, computed_rows = (
                self._connections[part.server],
                relayed_call.select_computed(part, rows),
            )
            try:
                if len(computed_rows):
                    self._receive(connection, part.call, computed_rows)
                if len(computed_rows) < len(rows):
                    self._sender.take_back(relayed_call.live_parts if relayed_call.is_sum else [part])
            except WrongAnswer as wrong:
                self._blame(connection.entry, str(wrong))
        if relay.entry.server not in self._entries:
            self._retire()

    def _fail(self, server: int) -> None:
        """Give up a connection and send its unanswered pairs to other servers.

        Late answers are lost with the connection and its memory. That is the fence that the paper lacks.
        """
        calls = open_calls(self._connections)
        other_parts = [part for one in calls for part in needing(one, server) if part.server != server]
        unanswered_calls = self._drop(server)
        entry = self._entries.get(server)
        if entry is not None and entry not in self._blamed_servers:
            self._connector.start(entry, self._secret)
        for call in unanswered_calls:
            if call.submission.is_released:
                continue
            if not len(call.pairs):
                call.submission.num_missing -= 1  # an empty call is not sent again
                self._arrivals.add(call.submission, call.pairs, 1)
                continue
            call.submission.attempt += 1
            self._sender.send(call.submission, call.missing_pairs)
        self._sender.take_back(other_parts)

    def _blame(self, entry: ServerEntry, reason: str) -> None:
        """Give up a server for good, until another process has its id."""
        LOG.warning("dropped expert server %d: it %s", entry.server, reason)
        self._blamed_servers.add(entry)
        self._faulty.append(FaultyServer(entry.server, entry.incarnation, reason))
        self._fail(entry.server)

    def _drop(self, server: int) -> list[OpenCall]:
        """Close the connection. Returns its unanswered calls."""
        connection = self._connections.pop(server, None)
        if connection is None:
            return []
        self._replicas.remove_server(server, connection.num_missing_pairs)
        self._make_room()  # the connection's memory may be freed
        connection.caller.close()
        for relayed_call in connection.relayed_calls.values():
            relayed_call.is_closed = True
        for call in connection.calls.values():
            if call.relayed_call is not None:
                call.relayed_call.end(call)
        return list(connection.calls.values())

    def _make_room(self) -> int:
        """Free the memory of calls that have whole answers. Returns how many there were."""
        return sum(one.move(self._answers) for one in self._submissions.values())

    def _retire(self) -> None:
        """Close connections to servers that left the directory, once they have no unanswered calls."""
        for server, connection in list(self._connections.items()):
            if server not in self._entries and not connection.calls and not connection.relayed_calls:
                self._drop(server)
