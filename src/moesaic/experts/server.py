"""The expert server: holds weights, knows no request. Collects rows from every client, computes, answers.

One loop: new clients and their calls come in, the scheduler (`policy.scheduling.schedulers.expert_server`)
says which pairs run together, the kernel runs them, each row goes into its call's answer. Nothing of a call
is kept once it is answered, so a server that dies loses nothing but time (Expert-as-a-Service, section 3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts import wire
from moesaic.experts.backend import CallPairs, ExpertBackend
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run
from moesaic.policy.scheduling.step_barrier import StepBarrier
from moesaic.transport.calls import Answerer, Incoming
from moesaic.transport.listening import Listener
from moesaic.transport.waiting import give_way, wait

LOG = logging.getLogger(__name__)
NONE: IntArray = np.zeros(0, dtype=np.int64)
SPIN = 50e-6
"""Seconds of looking for the next call before the loop sleeps."""


@dataclass
class Served:
    """What a server did so far; counters only grow."""

    calls: int = 0
    pairs: int = 0
    """(row, expert) pairs computed."""
    runs: int = 0
    expert_runs: int = 0
    """Experts whose weights were read, once for each run they were in."""
    busy_seconds: float = 0.0
    load: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """[layers, E] pairs of each expert."""


@dataclass
class _Call:
    """A call under way."""

    incoming: Incoming
    request: wire.Request
    answer: FloatRows
    """[p, h], or [m, h] when partial."""
    end: Answerer
    rows: FloatRows
    """[p, h] what the kernel writes: the answer itself, or what it is summed up from."""
    left: int
    """Pairs that were not computed yet."""


class ExpertServer:
    """Joins a listener, a scheduler and an arithmetic. `clock` in seconds, monotonic."""

    def __init__(
        self,
        layout: ExpertLayout,
        arithmetic: ExpertBackend,
        listener: Listener,
        service: ExpertServerScheduler,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._arithmetic = arithmetic
        self._listener = listener
        self._service = service
        self._gate = StepBarrier()
        self._clock = clock
        self._ends: dict[int, Answerer] = {}
        self._calls: dict[int, _Call] = {}
        self._next_client = 0
        self._next_call = 0
        self._line = {layer: line for line, layer in enumerate(layout.layers)}
        self._num_layers = max(layout.layers, default=0) + 1
        shape = (len(layout.layers), layout.num_experts)
        self.served = Served(load=np.zeros(shape, dtype=np.int64))

    @property
    def clients(self) -> int:
        return len(self._ends)

    @property
    def waiting_pairs(self) -> int:
        """Pairs that came in and were not computed yet."""
        return self._service.waiting_pairs

    def turn(self, timeout: float | None, wakeups: tuple[int, ...] = ()) -> None:
        """Take in what there is and compute one run; with nothing to do wait `timeout` seconds (None: for
        ever) for a call, a client, or one of `wakeups` (file descriptors)."""
        self._accept()
        for client, end in list(self._ends.items()):
            self._collect(client, end)
        now = self._clock()
        run = self._service.next_run(now)
        if run is not None:
            self._run(run, now)
            return
        patience = self._service.wait(now)
        limits = [limit for limit in (timeout, patience) if limit is not None]
        fds = (self._listener.fileno(), *wakeups)
        wait(list(self._ends.values()), fds, min(limits, default=None), SPIN)

    def close(self) -> None:
        """Drop every client; each sees it at once."""
        self._listener.close()
        for end in self._ends.values():
            end.close()
        self._ends.clear()

    def _accept(self) -> None:
        for end in self._listener.accepted():
            self._ends[self._next_client] = end
            self._service.client_joined(self._next_client)
            self._gate.joined(self._next_client)
            self._next_client += 1

    def _collect(self, client: int, end: Answerer) -> None:
        try:
            for incoming in end.poll():
                self._take(client, end, incoming)
        except DamagedMessage as damage:
            LOG.warning("dropped client %d: %s", client, damage)
            self._forget(client)
        except ConnectionLost as lost:
            LOG.info("client %d is gone: %s", client, lost)
            self._forget(client)

    def _take(self, client: int, end: Answerer, incoming: Incoming) -> None:
        layout = self._layout
        request = wire.parse(incoming.request, self._num_layers, layout.num_experts, layout.hidden)
        shape = (request.answer_rows, layout.hidden)
        known = request.layer in self._line or request.work is not None
        if not known or incoming.row_bytes != 4 * shape[1] or incoming.rows != shape[0]:
            raise DamagedMessage(f"a request for layer {request.layer} has an answer of another size")
        answer = np.ndarray(shape, np.float32, incoming.answer)
        call, self._next_call = self._next_call, self._next_call + 1
        pairs = len(request.experts)
        rows = answer if request.weights is None else np.empty((pairs, layout.hidden), dtype=np.float32)
        self._calls[call] = _Call(incoming, request, answer, end, rows, pairs)
        self.served.calls += 1
        if request.work is not None:
            self._service.client_paused(client)  # it is in no step until a gate opens
            self._open(self._gate.arrived(client, call, request.work))
            return
        self._service.client_joined(client)  # again, if a run began without it
        self._service.arrived(call, client, request.layer, request.experts, self._clock())

    def _forget(self, client: int) -> None:
        end = self._ends.pop(client)
        end.close()
        self._service.client_left(client)
        self._open(self._gate.left(client))
        self._calls = {number: call for number, call in self._calls.items() if call.end is not end}

    def _open(self, calls: list[int]) -> None:
        """Answer those that knocked: all begin a step, and its runs wait for all."""
        for number in calls:
            self._answer(number, NONE)
        for client in self._ends if calls else ():
            self._service.client_joined(client)

    def _run(self, run: Run, started: float) -> None:
        """Compute the parts of `run` as one batch and publish each in its call."""
        calls = self._parts(run)
        parts = [self._part(call, pairs) for call, pairs in calls]
        try:
            if any(len(part.experts) for part in parts):
                self._arithmetic.run(run.layer, parts)
        except KeyError as missing:
            self._refuse(run, missing)
            left = [(number, pairs) for number, pairs in run.parts if number in self._calls]
            if left:
                self._run(Run(run.layer, left), started)
            return
        for number, pairs in run.parts:
            self._answer(number, pairs)
        give_way()
        ids = np.concatenate([part.experts for part in parts])
        self._count(run.layer, ids, self._clock() - started)

    def _part(self, call: _Call, pairs: IntArray) -> CallPairs:
        request = call.request
        return CallPairs(request.hidden, request.rows[pairs], request.experts[pairs], call.rows, pairs)

    def _parts(self, run: Run) -> list[tuple[_Call, IntArray]]:
        return [(self._calls[number], pairs) for number, pairs in run.parts]

    def _answer(self, number: int, pairs: IntArray) -> None:
        """Tell the client what it may read. A call whose last pair this was is done with."""
        call = self._calls[number]
        call.left -= len(pairs)
        if not len(call.request.experts):
            call.incoming.publish(np.zeros(1, dtype=np.int64))
        elif call.request.weights is None:
            call.incoming.publish(pairs)
        elif not call.left:
            call.incoming.publish(_weighted(call))
        if not call.left:
            del self._calls[number]

    def _refuse(self, run: Run, missing: KeyError) -> None:
        """Some asked for experts that are not here: their placement is not ours. They must not wait."""
        held = self._arithmetic.held.get(run.layer, [])
        parts = self._parts(run)
        wrong = [call.end for call, pairs in parts if not np.isin(call.request.experts[pairs], held).all()]
        ends = wrong or [call.end for call, _ in parts]  # all of them, if what is held changed meanwhile
        for client in [client for client, end in self._ends.items() if end in ends]:
            LOG.warning("dropping client %d, which asked layer %d: %s", client, run.layer, missing.args[0])
            self._forget(client)

    def _count(self, layer: int, ids: IntArray, seconds: float) -> None:
        counts = np.bincount(ids, minlength=self._layout.num_experts)
        self.served.load[self._line[layer]] += counts
        self.served.pairs += len(ids)
        self.served.runs += 1
        self.served.expert_runs += int(np.count_nonzero(counts))
        self.served.busy_seconds += seconds


def _weighted(call: _Call) -> IntArray:
    """The score-weighted sums of Expert-as-a-Service: the first pair of every row, then every second one."""
    rows, weights = call.request.rows, call.request.weights
    assert weights is not None
    order = np.argsort(rows, kind="stable")
    before = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])  # pairs of the same row
    call.answer[:] = 0
    for turn in range(int(before.max()) + 1):
        these = order[before == turn]
        call.answer[rows[these]] += weights[these, None] * call.rows[these]
    return np.arange(len(call.answer))
