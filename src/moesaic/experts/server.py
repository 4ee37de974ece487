"""The expert server: it computes rows of experts for many clients and knows nothing of requests.

One loop accepts clients and their calls, and the scheduler chooses which pairs run together
(`policy.scheduling.schedulers.expert_server`). The kernel runs them and writes each row into its call's
answer. No state of a call is kept once it is answered, so a server that dies costs only time
(Expert-as-a-Service, section 3).

Question: Where is the main loop of an expert server?
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.backend import CallPairs, ExpertBackend
from moesaic.experts.observer import ServerObserver, UnobservedServer
from moesaic.experts.relay import Answering, Relay
from moesaic.experts.server_memory import CallMemory, HostCallMemory, HostMemory, ServerMemory
from moesaic.experts.workers import Workers
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run
from moesaic.policy.scheduling.step_barrier import StepBarrier
from moesaic.transport.calls import Answerer, Incoming
from moesaic.transport.listening import Listener
from moesaic.transport.waiting import wait, yield_core
from moesaic.transport.wakeup import Wakeup

LOG = logging.getLogger(__name__)
NO_PAIRS: IntArray = np.zeros(0, dtype=np.int64)
SPIN = 50e-6
"""Seconds of polling for the next call before the loop sleeps."""


@dataclass
class ServerCounters:
    """Counters of a server since it started. They only grow."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs computed."""
    runs: int = 0
    expert_runs: int = 0
    """Experts whose weights were read, counted once for each run that used them."""
    busy_seconds: float = 0.0
    load: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """[layers, E] pairs computed by each expert."""


@dataclass
class _Call:
    """A call that is not fully answered."""

    incoming: Answering
    request: wire.Request
    memory: CallMemory
    end: Answerer
    num_missing: int
    """Pairs that were not computed yet."""


class ExpertServer:
    """Joins a listener, a scheduler and a backend. `clock` returns monotonic seconds."""

    def __init__(
        self,
        layout: ExpertLayout,
        backend: ExpertBackend,
        listener: Listener,
        service: ExpertServerScheduler,
        clock: Callable[[], float],
        observer: ServerObserver | None = None,
        relay: Relay | None = None,
        memory: ServerMemory | None = None,
    ) -> None:
        """relay: passes parts of requests on. None: they are not computed.

        memory: where the rows of calls are. None: in memory of this host.
        """
        self._host_memory = HostMemory(layout.hidden)
        self._memory: ServerMemory = self._host_memory if memory is None else memory
        self._relay = Relay(None, Wakeup(), layout.hidden) if relay is None else relay
        self._observer: ServerObserver = observer or UnobservedServer()
        self._layout = layout
        self._backend = backend
        self._listener = listener
        self._service = service
        self._workers = Workers(service)
        self._barrier = StepBarrier()
        self._clock = clock
        self._ends: dict[int, Answerer] = {}
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._index = {layer: index for index, layer in enumerate(layout.layers)}
        self._num_layers = max(layout.layers, default=0) + 1
        shape = (len(layout.layers), layout.num_experts)
        self.counters = ServerCounters(load=np.zeros(shape, dtype=np.int64))

    @property
    def clients(self) -> int:
        """Number of connected clients, without relays."""
        return len(self._ends) - self._workers.relays

    @property
    def waiting_pairs(self) -> int:
        """Pairs that arrived and were not computed yet."""
        return self._service.waiting_pairs

    def turn(self, timeout: float | None, wakeups: tuple[int, ...] = ()) -> None:
        """Accept clients and calls, and compute one run.

        With nothing to compute it waits for a call, a client, or one of `wakeups` (file descriptors). It
        waits at most `timeout` seconds, or without limit if that is None.
        """
        self._accept()
        for client, end in list(self._ends.items()):
            self._collect(client, end)
        self._relay.poll()
        now = self._clock()
        run = self._service.next_run(now)
        if run is not None:
            self._observer.on_queue_changed(self._service.waiting_pairs)
            self._run(run, now)
            return
        patience = self._service.wait(now)
        limits = [limit for limit in (timeout, patience) if limit is not None]
        fds = (self._listener.fileno(), self._relay.fileno(), *wakeups)
        wait([*self._ends.values(), *self._relay.callers], fds, min(limits, default=None), SPIN)

    def close(self) -> None:
        """Close the connections of all clients. Each client notices at once."""
        self._listener.close()
        self._relay.close()
        for end in self._ends.values():
            end.close()
        self._ends.clear()

    def _accept(self) -> None:
        for end in self._listener.take_connections():
            client = self._workers.add_connection()
            self._ends[client] = end
            self._barrier.add_client(client)

    def _collect(self, client: int, end: Answerer) -> None:
        try:
            for incoming in end.poll():
                self._take(client, end, incoming)
        except DamagedMessage as damage:
            LOG.warning("dropped client %d: %s", client, damage)
            self._forget(client)
        except ConnectionLost as lost:
            LOG.debug("client %d is gone: %s", client, lost)
            self._forget(client)

    def _take(self, client: int, end: Answerer, incoming: Incoming) -> None:
        request = self._parse_request(client, incoming)
        if request.greeting:
            self._greet(client, incoming)
            return
        answering: Answering = incoming
        if request.parts:
            answer = self._host_memory.answer(incoming, request)
            answering = part = self._relay.take(incoming, request, answer)
            request = part.request
            memory: CallMemory = HostCallMemory.create(request, part.answer)
        else:
            memory = self._memory.open(incoming, request)
        number, self._next_call = self._next_call, self._next_call + 1
        self._calls[number] = _Call(answering, request, memory, end, len(request.experts))
        self.counters.calls += 1
        if request.work is None:
            self._queue(client, number, request)
        else:
            self._arrive(client, number, request)

    def _parse_request(self, client: int, incoming: Incoming) -> wire.Request:
        """The request of a call. Raises DamagedMessage for one that this client must not send."""
        request = self._memory.parse(incoming, self._num_layers, self._layout.num_experts)
        is_known = request.layer in self._index or request.work is not None or request.greeting
        fits = incoming.row_bytes == 4 * self._layout.hidden and incoming.rows == request.answer_rows
        if not is_known or not fits:
            raise DamagedMessage(f"a request for layer {request.layer} expects an answer of the wrong size")
        if self._workers.is_from_relay(client) and (request.parts or request.work is not None):
            raise DamagedMessage("a relay sent what only clients send")
        return request

    def _greet(self, client: int, incoming: Incoming) -> None:
        """A client says that it is a relay, so that nobody waits for it at the barrier."""
        self._workers.mark_relay(client)
        incoming.publish(np.zeros(1, dtype=np.int64))
        self._open(self._barrier.remove_client(client))

    def _queue(self, client: int, call: int, request: wire.Request) -> None:
        """The pairs of a call wait for their run. The barrier does not wait for a worker that computes."""
        own = self._workers.own_connection(client, request.worker)
        self._open([] if own is None else self._barrier.record_computing(own))
        caller = self._workers.caller(client, request.worker)
        self._service.add_call(call, caller, request.layer, request.experts, self._clock())
        self._observer.on_queue_changed(self._service.waiting_pairs)

    def _arrive(self, client: int, call: int, request: wire.Request) -> None:
        """A client is at the barrier. It runs no step until this or another server's barrier opens."""
        assert request.work is not None
        if self._barrier.has_begun_step(request.step):
            self._begin(call)
            return
        self._workers.pause(client, request.worker)
        self._open(self._barrier.record_arrival(client, call, request.work, request.step))

    def _begin(self, call: int) -> None:
        """Answer a call that arrived at the barrier."""
        wire.write_step_begun(self._calls[call].memory.answer.data.cast("B"), self._barrier.step - 1)
        self._answer(call, NO_PAIRS)

    def _forget(self, client: int) -> None:
        end = self._ends.pop(client)
        end.close()
        self._workers.remove_connection(client)
        self._observer.on_queue_changed(self._service.waiting_pairs)
        self._open(self._barrier.remove_client(client))
        self._calls = {number: call for number, call in self._calls.items() if call.end is not end}

    def _open(self, calls: list[int]) -> None:
        """Answer the calls of clients that arrived at the barrier.

        All begin a step, so its runs wait for all.
        """
        for number in calls:
            self._begin(number)
        if calls:
            self._workers.begin_step()

    def _run(self, run: Run, start_time: float) -> None:
        """Compute the parts of `run` as one batch and publish each of them in its call."""
        calls = self._parts(run)
        parts = [self._part(call, pairs) for call, pairs in calls]
        try:
            if any(len(part.experts) for part in parts):
                began = self._clock()
                self._backend.run(run.layer, parts)
                self._memory.finish([(call.memory, pairs) for call, pairs in calls])
                self._observer.on_run_computed(
                    run.layer, parts, len({id(call.end) for call, _ in calls}), began
                )
        except KeyError as missing:
            self._refuse(run, missing)
            left = [(number, pairs) for number, pairs in run.parts if number in self._calls]
            if left:
                self._run(Run(run.layer, left), start_time)
            return
        for number, pairs in run.parts:
            self._answer(number, pairs)
        yield_core()
        ids = np.concatenate([part.experts for part in parts])
        self._count(run.layer, ids, self._clock() - start_time)

    def _part(self, call: _Call, pairs: IntArray) -> CallPairs:
        request, memory = call.request, call.memory
        return CallPairs(memory.hidden, request.rows[pairs], request.experts[pairs], memory.rows, pairs)

    def _parts(self, run: Run) -> list[tuple[_Call, IntArray]]:
        return [(self._calls[number], pairs) for number, pairs in run.parts]

    def _answer(self, number: int, pairs: IntArray) -> None:
        """Publish these pairs to the client. A call whose last pair is among them is removed."""
        call = self._calls[number]
        call.num_missing -= len(pairs)
        if not len(call.request.experts):
            call.incoming.publish(np.zeros(1, dtype=np.int64))
        elif call.request.weights is None:
            call.incoming.publish(pairs)
        elif not call.num_missing:
            call.incoming.publish(call.memory.sum_pairs())
        if not call.num_missing:
            del self._calls[number]

    def _refuse(self, run: Run, missing: KeyError) -> None:
        """Drop clients that asked for experts that are not loaded here: they use another placement.

        So they do not wait for an answer that cannot come.
        """
        resident_experts = self._backend.resident_experts.get(run.layer, [])
        parts = self._parts(run)
        wrong = [
            call.end
            for call, pairs in parts
            if not np.isin(call.request.experts[pairs], resident_experts).all()
        ]
        ends = wrong or [
            call.end for call, _ in parts
        ]  # all of them, if the loaded experts changed meanwhile
        for client in [client for client, end in self._ends.items() if end in ends]:
            LOG.warning("dropping client %d, which asked layer %d: %s", client, run.layer, missing.args[0])
            self._forget(client)

    def _count(self, layer: int, ids: IntArray, seconds: float) -> None:
        counts = np.bincount(ids, minlength=self._layout.num_experts)
        self.counters.load[self._index[layer]] += counts
        self.counters.pairs += len(ids)
        self.counters.runs += 1
        self.counters.expert_runs += int(np.count_nonzero(counts))
        self.counters.busy_seconds += seconds
