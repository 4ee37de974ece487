"""Routed experts answered by servers: dispatch, combine, and what happens when a server is gone.

A submission's (row, rank) pairs are split by server (`policy.fleet.replicas`), each row travelling once to
each; the answers are put back at their pair, so that whoever answered when, the rows are those of a direct
call. Pairs that nobody can take now wait for a server that can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.barrier_client import BarrierClient
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.connector import Connector
from moesaic.experts.observer import ClientObserver, UnobservedClient
from moesaic.experts.outstanding import End, Memory, Posted, Sent, Submission, Summed, every_pair
from moesaic.kernels.reference.experts import put
from moesaic.kernels.table import Put
from moesaic.policy.fleet.replicas import NOBODY, Replicas
from moesaic.transport.calls import Caller
from moesaic.transport.waiting import give_way, wait
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
SPIN = 50e-6
"""Seconds of looking for an answer before the process sleeps."""


class RemoteExperts:
    """`RoutedExperts` over connections to expert servers. Used by one thread."""

    def __init__(
        self,
        layout: ExpertLayout,
        replicas: Replicas,
        connector: Connector,
        wakeup: Wakeup,
        clock: Callable[[], float],
        tell: int | None = None,
        everyone: bool = False,
        put: Put = put,
        observer: ClientObserver | None = None,
    ) -> None:
        """bell: the one that `connector` rings. tell: keep what comes in for `arrivals`, and of
        submissions of at most so many rows only once all of it is there. everyone: each
        submission asks each server, those that hold none of its experts with an empty call (for barriers).
        put: copies answers to where they are wanted.
        """
        self._layout = layout
        self._observer: ClientObserver = observer or UnobservedClient()
        self._tell = tell
        self._everyone = everyone
        self._barrier_client = BarrierClient(layout.hidden)
        self._news: list[tuple[RequestHandle, IntArray]] = []
        self._replicas = replicas
        self._connector = connector
        self._wakeup = wakeup
        self._clock = clock
        self._secret = b""
        self._version = -1
        self._entries: dict[int, ServerEntry] = {}
        self._ends: dict[int, End] = {}
        self._submissions: dict[int, Submission] = {}
        self._submitted = 0
        self._memory = Memory(put)
        self._stuck: list[Submission] = []
        self._posted = Posted(layout.layers, replicas.own)
        self._waited = 0.0

    # ---- RoutedExperts

    def submit(self, request: ExpertRequest) -> RequestHandle:
        began = self._clock()
        handle = RequestHandle(self._submitted)
        self._submitted += 1
        pairs = request.arrays
        submission = Submission(
            handle, request.layer, pairs.hidden, pairs.experts, pairs.weights, pairs.top_k
        )
        self._submissions[handle.number] = submission
        if self._wakeup.rung:  # a connection stands, perhaps the one to the own rank's server
            self._pump()
        self._send(submission, every_pair(len(pairs.experts), pairs.top_k)[0])
        if self._everyone:
            self._send_empty(submission)
        give_way()
        self._observer.sent(handle, request, began)
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        began = self._clock()
        submission = self._submissions[handle.number]
        if submission.missing:
            self._pump()
        if submission.missing:
            return None
        rows = self.rows(handle)
        self._observer.answered(handle, began)
        return rows

    def release(self, handle: RequestHandle) -> None:
        self._submissions.pop(handle.number).release()
        self._observer.released(handle)

    def arrivals(self) -> list[tuple[RequestHandle, IntArray]]:
        """The pairs (row * k + rank) that came in since the last call, by submission."""
        began = self._clock()
        self._pump()
        news, self._news = self._news, []
        self._observer.collected(news, began)
        return news

    def rows(self, handle: RequestHandle) -> torch.Tensor:
        """[n, k, h] with the rows that are there; they hold until the next call."""
        submission = self._submissions[handle.number]
        out = submission.room(self._memory)
        return torch.from_numpy(out).view(-1, submission.top_k, out.shape[1])

    def enter_barrier(self, work: bool) -> None:
        self._barrier_client.enter(work)
        self._observer.at_barrier(work)

    def passed_barrier(self) -> bool:
        if not self._barrier_client.waiting:
            return False
        self._pump()
        passed = self._barrier_client.entered()
        if passed:
            self._observer.at_barrier(False)
        return passed

    # ---- the servers

    def update(self, directory: Directory, secret: bytes) -> None:
        """Who serves what from now on."""
        known, self._entries = self._entries, {entry.server: entry for entry in directory.servers}
        self._secret, self._version = secret, directory.version
        self._replicas.place(directory.experts, self._layout.num_experts)
        for server in set(known) - set(self._entries):
            self._connector.stop(server)
        for server, entry in self._entries.items():
            end = self._ends.get(server)  # also where it had left and still owes answers
            if (known.get(server, entry) if end is None else end.entry) != entry:
                self._replicas.replaced(server)
                self._fail(server)
            elif server not in known and end is None:
                self._connector.start(entry, secret)
        self._retire()
        self._pump()

    @property
    def settled(self) -> int:
        calls = (sent.version for end in self._ends.values() for sent in end.calls.values())
        return min(calls, default=self._version)

    @property
    def busy(self) -> bool:
        """True while an answer is awaited, or one was not told of."""
        open_ends = self._barrier_client.waiting or bool(self._news)
        return open_ends or any(one.missing for one in self._submissions.values())

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """Sleep until an answer, a server, the file descriptor `wakeup`, or the time when a server is
        late."""
        started = self._clock()
        deadline = self._replicas.next_deadline()
        limits = [] if timeout is None else [timeout]
        if deadline is not None:
            limits.append(max(0.001, deadline - started))
        ends = [end.caller for end in self._ends.values()]
        news = wait(ends, (wakeup, self._wakeup.fileno()), min(limits, default=None), SPIN)
        if not self._barrier_client.idle:
            self._waited += self._clock() - started
        self._observer.waited(started)
        return news

    def stats(self) -> ExpertStats:
        return self._posted.stats(self._waited, self._replicas.stats)

    def close(self) -> None:
        for server in list(self._entries):
            self._connector.stop(server)
        for end in self._ends.values():
            end.caller.close()
        self._ends.clear()

    def _pump(self) -> None:
        """Everything that can be done without waiting."""
        if self._wakeup.rung:
            self._wakeup.clear()
            for entry, caller in self._connector.made():
                self._join(entry, caller)
        for server, end in list(self._ends.items()):
            try:
                for call, indices in end.caller.poll():
                    if call.number in end.calls:
                        self._receive(end, end.calls[call.number], indices)
                    else:
                        self._barrier_client.answered(end, call)
            except DamagedMessage as damage:
                LOG.warning("dropped expert server %d: %s", server, damage)
                self._fail(server)
            except ConnectionLost:
                self._fail(server)
        for server in self._replicas.late(self._clock()):
            self._replicas.mask(server)
            self._fail(server)
        self._retry()
        self._barrier_client.arrive([end for server, end in self._ends.items() if server in self._entries])

    def _join(self, entry: ServerEntry, caller: Caller) -> None:
        if self._entries.get(entry.server) != entry or entry.server in self._ends:
            caller.close()
            return
        self._ends[entry.server] = End(entry, caller)
        self._replicas.joined(entry.server)

    def _receive(self, end: End, sent: Sent, indices: IntArray) -> None:
        submission = sent.submission
        pairs, fresh = sent.receive(indices, self._memory)
        submission.missing -= fresh
        if self._tell is not None and len(submission.hidden) > self._tell:
            self._news.append((submission.handle, pairs))
        elif self._tell is not None and fresh and not submission.missing:
            self._news.append((submission.handle, every_pair(len(submission.experts), submission.top_k)[0]))
        self._replicas.answered(end.entry.server, fresh, self._clock())
        if not sent.left:
            del end.calls[sent.call.number]
            sent.done(end.caller.release)
            if end.entry.server not in self._entries:
                self._retire()

    def _send(self, submission: Submission, pairs: IntArray) -> None:
        """Each pair to a server that holds its expert; what nobody can take now waits."""
        for server, share in self._replicas.shares(submission.layer, submission.experts[pairs]):
            mine = pairs if share is None else pairs[share]
            if server == NOBODY or not self._post(server, submission, mine):
                submission.unsent.append(mine)
        if submission.unsent and submission not in self._stuck:
            self._stuck.append(submission)

    def _send_empty(self, submission: Submission) -> None:
        """A call without pairs to every server that got none with; those that leave wait for nobody."""
        for server in self._ends.keys() & self._entries.keys():
            asked = any(sent.submission is submission for sent in self._ends[server].calls.values())
            if not asked and self._post(server, submission, np.zeros(0, dtype=np.int64)):
                submission.missing += 1

    def _post(self, server: int, submission: Submission, pairs: IntArray) -> bool:
        """False when there is no room for another call to this server, or it is gone."""
        end = self._ends[server]
        hidden, row_of = submission.rows_of(pairs)
        count, width = hidden.shape
        partial = submission.scores is not None
        answers = max(1, count if partial else len(pairs))
        size = wire.size(count, len(pairs), width, partial)
        try:
            call = end.caller.open(size, answers, 4 * width)
            if call is None and sum(one.move(self._memory) for one in self._submissions.values()):
                call = end.caller.open(size, answers, 4 * width)  # answers that wait had the room
            if call is None:
                return False
            scores = submission.scores_of(pairs)
            asked = submission.experts[pairs], row_of, scores, hidden
            wire.write(call.request, submission.layer, *asked, submission.attempt)
            end.caller.post(call)
        except ConnectionLost:
            return False  # `_pump` hears of it too and sends again
        made = Summed if partial and len(pairs) else Sent
        end.calls[call.number] = made(submission, pairs, call, self._version)
        owed = max(1, len(pairs))  # an empty call is answered too, unless the server is frozen
        self._replicas.sent(server, owed, self._clock(), again=submission.attempt > 0)
        self._posted.add(submission.layer, server, len(pairs), size + answers * 4 * width)
        return True

    def _fail(self, server: int) -> None:
        """The connection is given up; what it owes goes to others.

        Late answers end up nowhere: the connection and its memory are the fence that the paper lacks.
        """
        left = self._drop(server)
        entry = self._entries.get(server)
        if entry is not None:
            self._connector.start(entry, self._secret)
        for sent in left:
            if sent.submission.released:
                continue
            if not len(sent.pairs):
                sent.submission.missing -= 1  # nobody waits at that server any more
                continue
            sent.submission.attempt += 1
            self._send(sent.submission, sent.missing)

    def _drop(self, server: int) -> list[Sent]:
        """Close the connection; its calls that lack answers."""
        end = self._ends.pop(server, None)
        if end is None:
            return []
        self._replicas.lost(server, end.outstanding)
        end.caller.close()
        return list(end.calls.values())

    def _retry(self) -> None:
        stuck, self._stuck = self._stuck, []
        for submission in [one for one in stuck if not one.released]:
            unsent, submission.unsent = submission.unsent, []
            self._send(submission, np.sort(np.concatenate(unsent)))

    def _retire(self) -> None:
        """Close connections to servers that are no longer listed, once they owe nothing."""
        for server, end in list(self._ends.items()):
            if server not in self._entries and not end.calls:
                self._drop(server)
