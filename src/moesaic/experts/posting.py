"""Sends the pairs of submissions to servers, and keeps what came in for clients that use parts of answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.client import RequestHandle, RowPlace
from moesaic.experts.outstanding import (
    CallCounts,
    OpenCall,
    PartialSumCall,
    RelayedPart,
    ServerConnection,
    Submission,
    every_pair,
)
from moesaic.experts.relaying import Relaying, Shares
from moesaic.policy.fleet.replicas import NO_SERVER, Replicas
from moesaic.transport.calls import Call, Caller

NO_PAIRS: IntArray = np.zeros(0, dtype=np.int64)


class MemoryCaller(Caller, Protocol):
    """A Caller that can also open calls whose rows are on the own GPU."""

    def open_on_device(self, request_bytes: int, rows: int, row_bytes: int, read: RowPlace) -> Call | None:
        """A call that reads rows from `read` and whose answer is on the own GPU, otherwise as `open`."""
        ...


def post_call(
    connection: ServerConnection,
    submission: Submission,
    pairs: IntArray,
    version: int,
    worker: int,
    make_room: Callable[[], int],
) -> tuple[OpenCall, int] | None:
    """Send these pairs. Returns the call, and the bytes of request and answer.

    version: of the directory. worker: its number in requests. make_room: frees memory of calls, and says
    whether there was any to free. None if there is no room for another call, or the server is gone.
    """
    row_indices, row_of = submission.rows_of(pairs)
    count, width = (
        len(submission.hidden) if row_indices is None else len(row_indices),
        submission.hidden.shape[1],
    )
    partial = submission.gate_weights is not None
    answers = max(1, count if partial else len(pairs))
    on_device = submission.place is not None and len(pairs) > 0
    size = wire.size(count, len(pairs), width, partial, on_device=on_device)
    shape = size, answers, 4 * width
    try:
        call = _open(connection.caller, shape, submission.place if on_device else None)
        if call is None and make_room():
            # unused answers took the room
            call = _open(connection.caller, shape, submission.place if on_device else None)
        if call is None:
            return None
        contents = submission.experts[pairs], row_of, submission.gate_weights_of(pairs)
        places, hidden = None, np.empty((0, width), np.float32)
        if submission.place is None:
            hidden = submission.hidden if row_indices is None else submission.hidden[row_indices]
        elif on_device:
            places = np.arange(count) if row_indices is None else row_indices
        route = submission.attempt, worker
        wire.write(call.request, submission.layer, *contents, hidden, *route, places=places)
        connection.caller.post(call)
    except ConnectionLost:
        return None  # the next poll of this connection reports it, and the pairs are sent again
    kind = PartialSumCall if partial and len(pairs) else OpenCall
    rows = 4 * width * count if on_device else 0
    return kind(submission, pairs, call, version), size + rows + answers * 4 * width


def _open(caller: Caller, shape: tuple[int, int, int], read: RowPlace | None) -> Call | None:
    """A call, on the device where it reads rows from there. shape: arguments of `Caller.open`."""
    if read is None:
        return caller.open(*shape)
    return cast(MemoryCaller, caller).open_on_device(
        *shape, read
    )  # `WorkerMemory.wrap_caller` has made it one


class Sender:
    """Sends pairs to the servers that `Replicas` chooses. Pairs that no server can take wait for one."""

    def __init__(
        self,
        replicas: Replicas,
        connections: Mapping[int, ServerConnection],
        relaying: Relaying,
        counts: CallCounts,
        clock: Callable[[], float],
        worker: int,
        make_room: Callable[[], int],
    ) -> None:
        """connections: by server, kept by the caller. worker, make_room: as of `post_call`."""
        self.version = -1
        """Version of the directory."""
        self._replicas, self._connections, self._relaying = replicas, connections, relaying
        self._counts, self._clock, self._worker, self._make_room = counts, clock, worker, make_room
        self._waiting_submissions: list[Submission] = []
        """Submissions with pairs that no server could take."""

    def send(self, submission: Submission, pairs: IntArray) -> None:
        """Send each pair to a server that holds its expert. Pairs that no server can take wait."""
        shares = [
            (server, pairs if share is None else pairs[share])
            for server, share in self._replicas.shares(submission.layer, submission.experts[pairs])
        ]
        for group in self._relaying.groups(submission, shares, self._clock()):
            if len(group) > 1 and self._post_parts(submission, group):
                continue
            for server, server_pairs in group:
                if server == NO_SERVER or not self._post(server, submission, server_pairs):
                    submission.unsent_pairs.append(server_pairs)
        if submission.unsent_pairs and submission not in self._waiting_submissions:
            self._waiting_submissions.append(submission)

    def send_empty(self, submission: Submission, servers: Collection[int]) -> None:
        """Send a call without pairs to every other one of these servers."""
        for server in servers:
            calls = self._connections[server].calls.values()
            has_call = any(call.submission is submission for call in calls)
            if not has_call and self._post(server, submission, NO_PAIRS):
                # Empty calls count as missing, so that the request ends after every server has answered.
                submission.num_missing, submission.has_empty_calls = submission.num_missing + 1, True

    def retry(self) -> None:
        """Send pairs that no server could take."""
        waiting, self._waiting_submissions = self._waiting_submissions, []
        for submission in [
            waiting_submission for waiting_submission in waiting if not waiting_submission.is_released
        ]:
            unsent_pairs, submission.unsent_pairs = submission.unsent_pairs, []
            self.send(submission, np.sort(np.concatenate(unsent_pairs)))

    def take_back(self, parts: Sequence[RelayedPart]) -> None:
        """Send what these parts lack directly. What still comes in for them is ignored."""
        for part in [relayed_part for relayed_part in parts if relayed_part.is_live]:
            call = part.call
            assert call.relayed_call is not None
            del self._connections[part.server].calls[call.call.number]
            self._relaying.pause_relaying(call.relayed_call, self._clock())
            call.relayed_call.end(call)
            if not call.submission.is_released:
                call.submission.attempt += 1
                self.send(call.submission, call.missing_pairs)
            self._replicas.record_taken_back(part.server, call.num_missing)

    def _post(self, server: int, submission: Submission, pairs: IntArray) -> bool:
        """Returns False when there is no room for another call to this server, or it is gone."""
        connection = self._connections[server]
        posted_call = post_call(connection, submission, pairs, self.version, self._worker, self._make_room)
        if posted_call is None:
            return False
        call, size = posted_call
        self._record_call(server, call)
        self._counts.add(submission.layer, server, len(pairs), size)
        return True

    def _post_parts(self, submission: Submission, shares: Shares) -> bool:
        """Send the shares as the parts of one call to the server of the first share. As `_post`."""
        relay = shares[0][0]
        relayed_call = self._relaying.post(self._connections[relay], submission, shares, self.version)
        if relayed_call is None:
            return False
        for part in relayed_call.parts:
            self._record_call(part.server, part.call)
        pairs = sum(len(share) for _, share in shares)
        self._counts.add(submission.layer, relay, pairs, relayed_call.size)
        return True

    def _record_call(self, server: int, call: OpenCall) -> None:
        self._connections[server].calls[call.call.number] = call
        num_rows = max(1, len(call.pairs))  # an empty call is answered too, unless the server is frozen
        self._replicas.record_sent(server, num_rows, self._clock(), is_resend=call.submission.attempt > 0)


class Arrivals:
    """What came in, for a client that uses parts of answers (`RemoteExperts.arrivals`)."""

    def __init__(self, portion_rows: int | None) -> None:
        """portion_rows: as of `RemoteExperts`. None: nothing is kept."""
        self._portion_rows = portion_rows
        self._arrivals: list[tuple[RequestHandle, IntArray]] = []

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def take(self) -> list[tuple[RequestHandle, IntArray]]:
        """The pairs that came in since the last call, by request."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def add(self, submission: Submission, pairs: IntArray, fresh: int) -> None:
        """These pairs came in. fresh: how many pairs or empty calls are new."""
        if self._portion_rows is None:
            return
        if len(submission.hidden) > self._portion_rows and not submission.has_empty_calls:
            self._arrivals.append((submission.handle, pairs))
        elif fresh and not submission.num_missing:
            all_pairs = every_pair(len(submission.experts), submission.top_k)[0]
            self._arrivals.append((submission.handle, all_pairs))
