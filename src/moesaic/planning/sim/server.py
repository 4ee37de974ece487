"""An expert server in virtual time: the loop of `experts.server.ExpertServer` over the same scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from moesaic.core.tokens import IntArray
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.connection import (
    AtBarrier,
    Call,
    Connection,
    Goodbye,
    Hello,
    Message,
    PartAnswer,
    RelayedCall,
    RelayedPart,
)
from moesaic.planning.sim.device import Device, Stream
from moesaic.planning.sim.timeline import Idle, Process, Sleep, Timeline, Waits
from moesaic.policy.fleet.relays import HOP
from moesaic.policy.scheduling.schedulers.expert_server import ExpertServerScheduler, Run
from moesaic.policy.scheduling.step_barrier import StepBarrier

Seconds = Callable[[int, int], float]
"""(pairs, experts) of a run -> how long it takes."""
TICK = 1e-9
"""Minimum seconds of a sleep. Rounding could make one of none."""


class SimulatedServer:
    """A process of an expert server. After its death another one takes its number."""

    def __init__(
        self,
        number: int,
        timeline: Timeline,
        device: Device,
        stream: Stream,
        service: ExpertServerScheduler,
        seconds: Seconds,
        shape: tuple[int, int],
        row_bytes: int,
        partial_sums: bool = False,
        hop: float = HOP,
    ) -> None:
        """shape: layers and experts of the model. row_bytes: of a row of an answer.

        partial_sums: answers have one row for each row of the call, not for each pair.
        hop: seconds that it needs for a message that it passes on.
        """
        self.number = number
        self.stream = stream
        self.alive = True
        self.load: IntArray = np.zeros(shape, dtype=np.int64)
        """[layers, E] pairs computed by each expert."""
        self.pair_seconds = 0.0
        """Waiting pairs, summed over time."""
        self.busy_seconds = 0.0
        self.runs = 0
        self.idle = Idle(timeline)
        self._last_waiting_pairs = 0
        self._timeline = timeline
        self._device = device
        self._service = service
        self._seconds = seconds
        self._row_bytes = row_bytes
        self._partial, self._hop = partial_sums, hop
        self._barrier = StepBarrier()
        self._inbox: list[tuple[Connection, Message]] = []
        self._inbox_pairs = 0
        self._clients: dict[Connection, int] = {}
        self._calls: dict[int, tuple[Connection, Call, int]] = {}
        """Number here -> the connection, the call, and how many pairs were not computed."""
        self._arrivals: dict[int, Connection] = {}
        """Number of each call at the barrier -> the connection."""
        self._next_client = self._next_call = 0
        self._last_count_time = timeline.now
        self._process = Process(timeline, self._run())

    @property
    def waiting_pairs(self) -> int:
        """Pairs that arrived and whose run has not begun, also those that the loop has not looked at."""
        return self._service.waiting_pairs + self._inbox_pairs

    def take(self, connection: Connection, message: Message) -> None:
        """Put a message into the inbox, as `ServerEnd` asks."""
        if self.alive:
            self._count()
            call = message.parts[0].call if isinstance(message, RelayedCall) else message
            if isinstance(call, Call):
                call.arrival_time = self._timeline.now
                self._inbox_pairs += len(call.pairs)
            self._inbox.append((connection, message))
            self._last_waiting_pairs = self.waiting_pairs
            self._process.wake()

    def freeze(self, resume_time: float) -> None:
        """Do nothing until then."""
        self._process.freeze(resume_time)

    def die(self, silent: bool) -> None:
        """End. The workers see their connections break, unless the whole host is `silent`."""
        self.alive = False
        self._process.stop()
        self.idle.end()
        for connection in self._clients:
            connection.is_broken = True
            if not silent:
                notice = partial(_report_broken, connection)
                self._timeline.schedule(self._timeline.now + self.stream.link.latency, notice)

    def _run(self) -> Waits:
        while True:
            self._collect()
            self._count()
            run = self._service.next_run(self._timeline.now)
            if run is not None:
                self._count()
                yield from self._compute(run)
                continue
            now = self._timeline.now
            patience = self._service.wait(now)
            self.idle.begin("calls" if patience is None else "more rows")
            yield Sleep(math.inf if patience is None else now + max(TICK, patience))
            self.idle.end()

    def _count(self) -> None:
        """Add what has waited since the last time."""
        now = self._timeline.now
        self.pair_seconds += self._last_waiting_pairs * (now - self._last_count_time)
        self._last_count_time, self._last_waiting_pairs = now, self.waiting_pairs

    def _collect(self) -> None:
        """Take what has arrived, client by client, as a server does that looks at one after another."""
        inbox, self._inbox, self._inbox_pairs = self._inbox, [], 0
        # Python's sort is stable, so messages of one client keep their order.
        if len(inbox) > 1:
            inbox.sort(key=lambda item: self._clients.get(item[0], math.inf))
        for connection, message in inbox:
            match message:
                case Hello():
                    self._accept(connection)
                case Goodbye():
                    self._forget(connection)
                case AtBarrier():
                    self._at_barrier(connection, message)
                case Call():
                    self._take(connection, message)
                case RelayedCall():
                    self._take(connection, message.parts[0].call)
                    for part in message.parts[1:]:
                        self._after_a_hop(partial(self._pass_on, part))
                case PartAnswer():
                    self._after_a_hop(partial(self._pass_back, message))

    def _accept(self, connection: Connection) -> None:
        client, self._next_client = self._next_client, self._next_client + 1
        self._clients[connection] = client
        self._service.client_joined(client)
        self._barrier.add_client(client)
        end = connection.client_end
        assert isinstance(end, SimulatedExperts)
        connection.answer(partial(end.on_server_joined, connection), 0)

    def _forget(self, connection: Connection) -> None:
        client = self._clients.pop(connection, None)
        if client is None:
            return
        self._service.client_left(client)
        self._open(self._barrier.remove_client(client))
        self._calls = {number: entry for number, entry in self._calls.items() if entry[0] is not connection}

    def _at_barrier(self, connection: Connection, message: AtBarrier) -> None:
        client = self._clients[connection]
        number, self._next_call = self._next_call, self._next_call + 1
        self._arrivals[number] = connection
        if self._barrier.has_begun_step(message.step):
            self._begin(number)
            return
        self._service.client_paused(client)
        self._open(self._barrier.record_arrival(client, number, message.work, message.step))

    def _begin(self, number: int) -> None:
        connection = self._arrivals.pop(number)
        if connection in self._clients:
            end = connection.client_end
            assert isinstance(end, SimulatedExperts)
            connection.answer(partial(end.on_barrier_opened, self._barrier.step - 1), 0)

    def _open(self, numbers: list[int]) -> None:
        for number in numbers:
            self._begin(number)
        for client in self._clients.values() if numbers else ():
            self._service.client_joined(client)

    def _take(self, connection: Connection, call: Call) -> None:
        if connection not in self._clients:
            return
        number, self._next_call = self._next_call, self._next_call + 1
        client, now = self._clients[connection], self._timeline.now
        self._open(self._barrier.record_computing(client))
        self._calls[number] = connection, call, len(call.pairs)
        self._service.client_joined(client)
        self._service.add_call(number, client, call.submission.layer, call.experts, now)

    def _compute(self, run: Run) -> Waits:
        began = self._timeline.now
        parts = [(number, self._calls[number][1], pairs) for number, pairs in run.parts]
        ids = np.concatenate([_select_experts(call, pairs) for _, call, pairs in parts])
        for _, call, _ in parts:
            call.begin_time = call.begin_time or began
        if len(ids):
            counts = np.bincount(ids, minlength=self.load.shape[1])
            self.load[run.layer] += counts
            num_experts = int(np.count_nonzero(counts))
            seconds = self._seconds(len(ids), num_experts)
            label = f"layer {run.layer}"
            yield from self._device.compute(
                f"expert server {self.number}",
                label,
                seconds,
                pairs=len(ids),
                experts=num_experts,
                calls=len(parts),
            )
            self.busy_seconds += seconds
            self.runs += 1
        for number, pairs in run.parts:
            if number in self._calls:
                self._answer(number, pairs)

    def _answer(self, number: int, pairs: IntArray) -> None:
        connection, call, left = self._calls[number]
        left -= len(pairs)
        call.end_time = self._timeline.now
        if left:
            self._calls[number] = connection, call, left
        else:
            del self._calls[number]
        if not self._partial:
            rows, answered_pairs = len(pairs), pairs
        elif left:
            return
        else:
            rows, answered_pairs = call.rows, np.arange(len(call.pairs))
        if call.relayed_call is None or (
            connection is call.relayed_call.relay_connection and not self._partial
        ):
            end = connection.client_end
            assert isinstance(end, SimulatedExperts)
            news = partial(end.on_answer, connection, call.number, answered_pairs)
            connection.answer(news, rows * self._row_bytes)
        elif connection is call.relayed_call.relay_connection:
            self._pass_back(PartAnswer(call, answered_pairs, rows))
        else:
            relay, part_answer = call.relayed_call.relay_connection, PartAnswer(call, answered_pairs, rows)
            arrive = lambda: None if relay.is_broken else relay.server_end.take(relay, part_answer)  # noqa: E731
            self.stream.send(relay.server_end.stream.name, rows * self._row_bytes, arrive)

    # ---- as a relay

    def _after_a_hop(self, act: Callable[[], None]) -> None:
        """Do it once this process has received and copied a message, unless it dies."""
        self._timeline.schedule(self._timeline.now + self._hop, lambda: act() if self.alive else None)

    def _pass_on(self, part: RelayedPart) -> None:
        """Send a part to its server, which takes its rows as those of the worker."""
        connection, call = part.connection, part.call
        arrive = lambda: None if connection.is_broken else connection.server_end.take(connection, call)  # noqa: E731
        self.stream.send(connection.server_end.stream.name, call.rows * self._row_bytes, arrive)

    def _pass_back(self, part_answer: PartAnswer) -> None:
        """Send an answer of a part to the worker. Sums are sent once all parts have theirs."""
        relayed_call = part_answer.call.relayed_call
        assert relayed_call is not None
        if not relayed_call.is_sum:
            news, rows = [(part_answer.call, part_answer.pairs)], part_answer.rows
        else:
            relayed_call.num_sums += 1
            if relayed_call.num_sums < len(relayed_call.parts):
                return
            news = [(part.call, np.arange(len(part.call.pairs))) for part in relayed_call.parts]
            rows = relayed_call.rows
        connections = {part.call.number: part.connection for part in relayed_call.parts}
        end = relayed_call.relay_connection.client_end
        assert isinstance(end, SimulatedExperts)

        def tell() -> None:
            for call, pairs in news:
                end.on_answer(connections[call.number], call.number, pairs)

        relayed_call.relay_connection.answer(tell, rows * self._row_bytes)


def _select_experts(call: Call, pairs: IntArray) -> IntArray:
    """The experts of these pairs of a call, in any order if it is all of them."""
    return call.experts if len(pairs) == len(call.pairs) else call.experts[pairs]


def _report_broken(connection: Connection) -> None:
    end = connection.client_end
    assert isinstance(end, SimulatedExperts)
    end.on_connection_broken(connection)
