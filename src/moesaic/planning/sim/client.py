"""A worker's side of the expert servers in virtual time. It has the calls of `experts.remote.RemoteExperts`.

Who is asked, and when a server counts as gone, decides `policy.fleet.replicas`, as in a real worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.core.topology import Way
from moesaic.planning.sim.connection import (
    AtBarrier,
    Call,
    Connection,
    Goodbye,
    Hello,
    RelayedCall,
    RelayedPart,
    ServerEnd,
    Submission,
)
from moesaic.planning.sim.device import Stream
from moesaic.planning.sim.timeline import Timeline
from moesaic.policy.fleet.relays import Relays, find_awaited_servers, needing
from moesaic.policy.fleet.replicas import NO_SERVER, Replicas

MIN_SLEEP_SECONDS = 1e-3
"""Minimum seconds that a real worker sleeps before it looks for late servers again."""


class SimulatedExperts:
    """The experts of a worker, which are on servers."""

    def __init__(
        self,
        timeline: Timeline,
        stream: Stream,
        replicas: Replicas,
        num_experts: int,
        row_bytes: int,
        portion_rows: int | None = None,
        every_server: bool = False,
        wake: Callable[[], None] = lambda: None,
        on_call_answered: Callable[[Call, float], None] = lambda call, now: None,
        way: Callable[[int], Way] | None = None,
        relays: Relays | None = None,
        partial: bool = False,
    ) -> None:
        """row_bytes: of a row that travels. portion_rows, every_server: as in `RemoteExperts`.

        wake: called when something has arrived. on_call_answered: called with each answered call and when.
        way: returns the way to a server. None: all servers are near.
        relays: which servers are asked through another one. None: none. partial: answers are sums.
        """
        self.stream, self.wake, self.replicas = stream, wake, replicas
        self.calls = self.pairs = 0
        self._timeline = timeline
        self._num_experts, self._row_bytes = num_experts, row_bytes
        self._portion_rows, self._every_server = portion_rows, every_server
        self._on_call_answered = on_call_answered
        self._way, self._relays, self._partial = way, relays, partial
        self._relayed_calls: list[RelayedCall] = []
        """Calls that go through a relay, as long as some of their parts are open."""
        self._entries: dict[int, ServerEnd] = {}
        """The servers of the directory."""
        self._connections: dict[int, Connection] = {}
        """Connections by server. Their servers have answered the worker's hello."""
        self._news: list[tuple[Connection, Callable[[], None]]] = []
        self._lost_connections: list[Connection] = []
        self._leaving = False
        """Whether a server that left the directory is still connected."""
        self._open: dict[int, Submission] = {}
        """Submissions without a complete answer, by number."""
        self._stuck_submissions: list[Submission] = []
        self._arrivals: list[tuple[int, IntArray]] = []
        self._num_submissions = self._num_calls = 0
        self._work: bool | None = None
        """The `work` flag to arrive at the barrier with. None: it does not wait there."""
        self._at_barrier: set[Connection] = set()
        self._step = 1
        """Number of the step that it begins next."""
        self._has_passed_barrier = False

    # ---- what a step asks for

    def submit(self, layer: int, expert_ids: IntArray) -> int:
        """Ask for rows. expert_ids: [n, k]. Returns the number of the submission."""
        self._num_submissions += 1
        experts = expert_ids.reshape(-1)
        submission = Submission(self._num_submissions, layer, experts, expert_ids.shape[1], len(experts))
        self._open[submission.number] = submission
        self._send(submission, np.arange(len(experts)))
        if self._every_server:
            self._send_empty(submission, sorted(self._connections.keys() & self._entries.keys()))
        if not submission.missing:
            del self._open[submission.number]
        return submission.number

    def is_complete(self, number: int) -> bool:
        """Whether the whole answer is here."""
        return number not in self._open

    def arrivals(self) -> list[tuple[int, IntArray]]:
        """The pairs that came in since the last call, by submission."""
        self.progress()
        new_arrivals, self._arrivals = self._arrivals, []
        return new_arrivals

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._open)

    # ---- the servers

    def update(
        self, entries: Mapping[int, ServerEnd], experts: Mapping[int, Mapping[int, Sequence[int]]]
    ) -> None:
        """Use these servers from now on. experts: server -> layer -> its experts."""
        old_entries, self._entries = self._entries, dict(entries)
        ways = {} if self._way is None else {server: self._way(server) for server in entries}
        self.replicas.place(experts, self._num_experts, ways=ways)
        for server, end in entries.items():
            if server not in old_entries:
                self._connect(server)
            elif old_entries[server] is not end:
                self.replicas.record_replacement(server)
                self._fail(server)
        # Servers that left may have answered everything already, and no later answer would close them.
        self._leaving = True
        self._retire()
        self.progress()

    def on_connection_broken(self, connection: Connection) -> None:
        """The connection's server is gone, and its end is seen once the worker looks."""
        self._lost_connections.append(connection)
        self.wake()

    def deadline(self) -> float:
        """When to look again although nothing has arrived: the next timeout of a server."""
        slow = (
            self.replicas.next_slow(find_awaited_servers(self._drop_complete_relays()))
            if self._relayed_calls
            else None
        )
        deadlines = [time for time in (self.replicas.next_deadline(), slow) if time is not None]
        return max(self._timeline.now + MIN_SLEEP_SECONDS, min(deadlines)) if deadlines else math.inf

    def take(self, connection: Connection, news: Callable[[], None]) -> None:
        """Keep what arrived on a connection until the worker looks, as `ClientEnd` asks."""
        self._news.append((connection, news))
        self.wake()

    def progress(self) -> None:
        """Do everything that can be done without waiting."""
        news, self._news = self._news, []
        for connection, act in news:
            if not connection.is_closed:
                act()
        lost_connections, self._lost_connections = self._lost_connections, []
        for connection in lost_connections:
            if self._connections.get(connection.server) is connection:
                self._fail(connection.server)
        relayed_calls = self._drop_complete_relays()
        for server in (
            self.replicas.slow(find_awaited_servers(relayed_calls), self._timeline.now)
            if relayed_calls
            else ()
        ):
            self._take_back(
                [part for relayed_call in relayed_calls for part in needing(relayed_call, server)]
            )
        for server in self.replicas.late(self._timeline.now):
            self.replicas.mask(server)
            self._fail(server)
        if self._stuck_submissions:
            self._retry()
        if self._work is not None:
            self._arrive()

    def leave(self) -> None:
        """The worker's process is gone: close all connections."""
        for connection in self._connections.values():
            self._close(connection)
        self._connections.clear()

    # ---- the barrier

    def enter_barrier(self, work: bool) -> None:
        """Wait at the barrier, with rows to compute or without. Call it again when that changes."""
        self._work, self._at_barrier = work, set()

    def has_passed_barrier(self) -> bool:
        """True once after `enter_barrier`, when all workers begin the step."""
        if self._work is None and not self._has_passed_barrier:
            return False
        self.progress()
        has_passed, self._has_passed_barrier = self._has_passed_barrier, False
        return has_passed

    @property
    def cause(self) -> str:
        """What a worker that has nothing to do waits for."""
        if self._work is not None:
            return "barrier" if self._work else "requests"
        return "experts" if self._open else "requests"

    def on_barrier_opened(self, step: int) -> None:
        """A server's barrier has opened for this step. The worker may have begun it before."""
        if self._work is not None and step >= self._step:
            self._work, self._has_passed_barrier, self._step = None, True, step + 1

    def _arrive(self) -> None:
        assert self._work is not None
        for server, connection in self._connections.items():
            if server in self._entries and connection not in self._at_barrier:
                self._at_barrier.add(connection)
                connection.send(AtBarrier(self._work, self._step), 0)

    # ---- calls

    def on_server_joined(self, connection: Connection) -> None:
        """A server has answered the hello."""
        server = connection.server
        current = self._entries.get(server) is connection.server_end
        if not current or server in self._connections:
            connection.is_closed = True
            return
        self._connections[server] = connection
        self.replicas.add_server(server)
        if self._every_server:  # it waits for this worker in the layers that are under way, too
            self._retry()
            for submission in list(self._open.values()):
                self._send_empty(submission, (server,))

    def on_answer(self, connection: Connection, number: int, pairs: IntArray) -> None:
        """A server has answered these of the call's pairs: indices [r]."""
        # An answer of a connection that was given up has been asked of another server since.
        if self._connections.get(connection.server) is not connection or number not in connection.calls:
            return  # it came through a relay, and was taken back meanwhile
        call, now = connection.calls[number], self._timeline.now
        fresh, submission = call.receive(pairs), call.submission
        submission.missing -= fresh
        self.replicas.record_answer(connection.server, fresh, now)
        self._report(submission, call.pairs[pairs])
        if not call.left:
            del connection.calls[number]
            if call.relayed_call is not None:
                call.relayed_call.end(call)
            self._on_call_answered(call, now)
        if not submission.missing:
            self._open.pop(submission.number, None)
        if self._leaving:
            self._retire()

    def _report(self, submission: Submission, pairs: IntArray) -> None:
        """Keep for `arrivals` what came in: large submissions part by part, others once complete."""
        if self._portion_rows is None:
            return
        if (
            len(submission.experts) > self._portion_rows * submission.top_k
            and not submission.is_reported_whole
        ):
            self._arrivals.append((submission.number, pairs))
        elif not submission.missing:
            self._arrivals.append((submission.number, np.arange(len(submission.experts))))

    def _send(self, submission: Submission, pairs: IntArray) -> None:
        experts = submission.experts[pairs]
        server_shares = by_server(
            self.replicas.route(submission.layer, experts), pairs, experts, submission.top_k
        )
        shares = {share.server: share for share in server_shares}
        if self._relays is not None:
            pairs_by_server = {server: share.pairs for server, share in shares.items()}
            ways, now = self.replicas.ways, self._timeline.now
            for group in self._relays.groups(pairs_by_server, submission.top_k, ways, self._partial, now):
                self._post_parts(submission, [shares.pop(server) for server in group])
        for share in shares.values():
            if share.server == NO_SERVER:
                submission.unsent_pairs.append(share.pairs)
            else:
                self._post(submission, share)
        if submission.unsent_pairs and submission not in self._stuck_submissions:
            self._stuck_submissions.append(submission)

    def _send_empty(self, submission: Submission, servers: Iterable[int]) -> None:
        """Call those of these servers that have no pairs of this submission, too."""
        no_pairs = np.zeros(0, dtype=np.int64)
        for server in servers:
            if not any(call.submission is submission for call in self._connections[server].calls.values()):
                submission.missing, submission.is_reported_whole = submission.missing + 1, True
                self._post(submission, Share(server, no_pairs, no_pairs, 0))

    def _post(self, submission: Submission, share: Share) -> None:
        call = self._call(submission, share)
        self.calls += 1
        self._connections[share.server].send(call, share.rows * self._row_bytes)

    def _post_parts(self, submission: Submission, shares: list[Share]) -> None:
        """Send the shares as the parts of one call to the server of the first share."""
        relay_connection = self._connections[shares[0].server]
        rows = len(np.unique(np.concatenate([share.pairs for share in shares]) // submission.top_k))
        parts = [
            RelayedPart(self._connections[share.server], self._call(submission, share)) for share in shares
        ]
        relayed_call = RelayedCall(
            relay_connection, self.replicas.ways[relay_connection.server].host, rows, self._partial, parts
        )
        for part in parts:
            part.call.relayed_call = relayed_call
        self._relayed_calls.append(relayed_call)
        self.calls += 1
        relay_connection.send(relayed_call, rows * self._row_bytes)

    def _call(self, submission: Submission, share: Share) -> Call:
        """A call that is under way from now on."""
        now, count = self._timeline.now, len(share.pairs)
        self._num_calls += 1
        call = Call(self._num_calls, submission, share.pairs, share.experts, share.rows, max(1, count), now)
        self._connections[share.server].calls[call.number] = call
        self.pairs += count
        self.replicas.record_sent(share.server, call.left, now, is_resend=submission.attempt > 0)
        return call

    def _drop_complete_relays(self) -> list[RelayedCall]:
        """The calls of which parts are open."""
        self._relayed_calls = [
            relayed_call for relayed_call in self._relayed_calls if relayed_call.live_parts
        ]
        return self._relayed_calls

    def _take_back(self, parts: list[RelayedPart]) -> None:
        """Send what these parts lack directly, as `posting.Sender` does."""
        for part in [live_part for live_part in parts if live_part.live]:
            call = part.call
            assert call.relayed_call is not None and self._relays is not None
            del part.connection.calls[call.number]
            self._relays.rest_host(call.relayed_call.host, self._timeline.now)
            call.relayed_call.end(call)
            call.submission.attempt += 1
            self._send(call.submission, call.missing)
            self.replicas.record_taken_back(part.server, call.left)

    def _connect(self, server: int) -> None:
        Connection(server, self, self._entries[server]).send(Hello(), 0)

    def _fail(self, server: int) -> None:
        """Give up a connection, connect again, and send its unanswered pairs to other servers."""
        affected_parts = [
            part
            for failed_part in self._drop_complete_relays()
            for part in needing(failed_part, server)
            if part.server != server
        ]
        connection = self._connections.pop(server, None)
        if connection is not None:
            for call in connection.calls.values():
                if call.relayed_call is not None:
                    call.relayed_call.end(call)
            self.replicas.remove_server(
                server, sum(len(call.pairs) and call.left for call in connection.calls.values())
            )
            self._close(connection)
        if server in self._entries:
            self._connect(server)
        for call in () if connection is None else connection.calls.values():
            failed_part = call.submission
            if not len(call.pairs):
                failed_part.missing -= 1  # an empty call is not sent again
                if not failed_part.missing:
                    self._open.pop(failed_part.number, None)
                    self._report(failed_part, call.pairs)
                continue
            failed_part.attempt += 1
            self._send(failed_part, call.missing)
        self._take_back(affected_parts)

    def _close(self, connection: Connection) -> None:
        connection.is_closed = True
        connection.send(Goodbye(), 0)

    def _retry(self) -> None:
        submissions, self._stuck_submissions = self._stuck_submissions, []
        for submission in submissions:
            unsent_pairs, submission.unsent_pairs = submission.unsent_pairs, []
            self._send(submission, np.sort(np.concatenate(unsent_pairs)))

    def _retire(self) -> None:
        """Close connections to servers that left the directory, once they have answered their calls."""
        leaving = self._connections.keys() - self._entries.keys()
        self._leaving = bool(leaving)
        for server in leaving:
            if not self._connections[server].calls:
                connection = self._connections.pop(server)
                self.replicas.remove_server(server)
                self._close(connection)


class Share(NamedTuple):
    """The pairs of a submission that one server gets."""

    server: int
    pairs: IntArray
    """[p] ascending."""
    experts: IntArray
    """[p] the expert of each."""
    rows: int
    """Number of their rows."""


def by_server(servers: IntArray, pairs: IntArray, experts: IntArray, top_k: int) -> list[Share]:
    """The pairs [n] of each server, by ascending servers. servers, experts: [n] of each pair.

    Example: top-2, pairs 0 1 2 3 with servers 5 5 3 5 -> server 3 has pair 2, and server 5 has pairs 0 1 3 of
    two rows.
    """
    if not len(pairs):
        return []
    order = np.argsort(servers, kind="stable")
    sorted_servers, sorted_pairs, sorted_experts = servers[order], pairs[order], experts[order]
    is_new_server = sorted_servers[1:] != sorted_servers[:-1]
    row, first = sorted_pairs // top_k, np.ones(len(sorted_pairs), dtype=np.int64)
    first[1:] = is_new_server | (row[1:] != row[:-1])
    starts = np.concatenate([[0], np.flatnonzero(is_new_server) + 1])
    rows, numbers, bounds = (
        np.add.reduceat(first, starts).tolist(),
        sorted_servers[starts].tolist(),
        starts.tolist(),
    )
    ends = [*bounds[1:], len(sorted_pairs)]
    return [
        Share(server, sorted_pairs[begin:end], sorted_experts[begin:end], count)
        for server, begin, end, count in zip(numbers, bounds, ends, rows, strict=True)
    ]
