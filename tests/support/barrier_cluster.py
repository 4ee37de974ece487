"""Workers and expert servers of the barrier schedule without processes: messages travel when a test says so.

The servers are real, and so are the workers' arrivals at barriers. The clock stands still. So a server that
waits for a client as long as its patience lasts waits for ever, and the cluster is stuck.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import ExpertLayout, ServerEntry
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.barrier_client import BarrierClient
from moesaic.experts.outstanding import ServerConnection
from moesaic.experts.relay import Relay
from moesaic.experts.server import ExpertServer
from moesaic.policy.scheduling.microqueue import make_policy
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.policy.scheduling.schedulers.server_setup import BARRIER_SECONDS, IN_STEP, UNREACHABLE_PAIRS
from moesaic.transport.wakeup import Wakeup

HIDDEN = 8
RELAY = Relay(None, Wakeup(), HIDDEN)
Event = tuple[str, int, int]
"""What happens, at which worker and at which server. Server -1: at none."""


@dataclass(eq=False)
class Posted:
    """A Call, and the Incoming that the server sees."""

    number: int
    request: memoryview
    answer: memoryview
    channel: Channel
    rows: int = 1
    row_bytes: int = 4 * HIDDEN

    def publish(self, indices: IntArray) -> None:
        self.channel.answers.append(self)


@dataclass(eq=False)
class Channel:
    """A connection. It is the Caller of its worker and the Answerer of its server."""

    posted: deque[Posted] = field(default_factory=deque)
    """Calls that the server has not got."""
    arrived: deque[Posted] = field(default_factory=deque)
    """Calls that the server has got, but has not looked at."""
    answers: deque[Posted] = field(default_factory=deque)
    """Calls whose answer the worker has not got."""
    count: int = 0
    closed: bool = False
    """By the worker."""

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Posted:
        self.count += 1
        return Posted(
            self.count, memoryview(bytearray(request_bytes)), memoryview(bytearray(4 * HIDDEN)), self
        )

    def post(self, call: Posted) -> None:
        self.posted.append(call)

    def release(self, call: Posted) -> None: ...

    def poll(self) -> list[Posted]:
        if self.closed:
            raise ConnectionLost("the worker is gone")
        found = list(self.arrived)
        self.arrived.clear()
        return found

    def ready(self) -> bool:
        return True

    def close(self) -> None: ...


class Backend:
    """Computes nothing, and notes which calls ran together."""

    def __init__(self, layers: int) -> None:
        self.resident_experts = {layer: [0] for layer in range(layers)}
        self.runs: list[tuple[int, int]] = []
        """(layer, calls with rows) of each run."""

    def run(self, layer: int, parts: list[Any]) -> None:
        self.runs.append((layer, len(parts)))


class Listening:
    """A Listener whose clients the test adds."""

    def __init__(self) -> None:
        self.waiting: list[Channel] = []

    def take_connections(self) -> list[Channel]:
        found, self.waiting = self.waiting, []
        return found

    def fileno(self) -> int:
        return 0


class Server:
    """A real server with the settings of the barrier schedule."""

    def __init__(self, layers: int) -> None:
        prefixes = dict.fromkeys(range(layers), "")
        layout = ExpertLayout(prefixes, "gate", "up", "down", HIDDEN, 1, 1, 1, "float32")
        self.backend, self.listener = Backend(layers), Listening()
        self.service = ExpertServerScheduler(
            tuple(prefixes), make_policy(IN_STEP), EnoughPairs(UNREACHABLE_PAIRS, BARRIER_SECONDS)
        )
        self.real = ExpertServer(
            layout,
            self.backend,  # type: ignore[arg-type]
            self.listener,  # type: ignore[arg-type]
            self.service,
            lambda: 0.0,
            relay=RELAY,
        )

    def turn(self) -> None:
        """Turn until nothing is left to do without waiting."""
        runs = -1
        while runs < self.service._runs:
            runs = self.service._runs
            self.real.turn(0.0)


class Worker:
    """A worker that waits at the barrier, runs a step layer by layer, and waits again."""

    def __init__(self, number: int, layers: int) -> None:
        self.number, self.layers = number, layers
        self.barrier = BarrierClient(HIDDEN, number + 1)
        self.ends: list[ServerConnection] = []
        self.requests = 0
        """Steps with rows that this worker wants to run."""
        self.steps = 0
        """Steps that it ended, also those without rows."""
        self.layer: int | None = None
        """The layer of the running step. None: it waits at the barrier."""
        self._left: dict[tuple[int, int], ServerConnection] = {}
        """The calls of this layer without an answer."""
        self._said = False

    def connect(self, server: int, channel: Channel) -> None:
        self.ends.append(ServerConnection(ServerEntry(server, 1, Endpoint("unix:x")), channel))  # type: ignore[arg-type]
        self.act()

    def begin(self) -> None:
        """Arrive at the first barrier."""
        self._enter()

    def lose(self, server: int) -> None:
        """The connection broke. Calls without an answer are given up."""
        self.ends = [end for end in self.ends if end.entry.server != server]
        self._left = {key: end for key, end in self._left.items() if key[0] != server}
        self.act()

    def asked(self, requests: int) -> None:
        """Requests come in."""
        self.requests += requests
        if self.layer is None and not self._said:
            self._enter()

    def take(self, server: int) -> None:
        """Take what has come in from this server."""
        for end in self.ends:
            if end.entry.server != server:
                continue
            channel = channel_of(end)
            while channel.answers:
                call = channel.answers.popleft()
                if call.number in end.barrier_calls or (server, call.number) not in self._left:
                    self.barrier.on_answer(end, call)
                else:
                    del self._left[server, call.number]
        self.act()

    def act(self) -> None:
        """Do everything that can be done without waiting."""
        if self.layer is None:
            self.barrier.arrive(self.ends)
            if self.barrier.poll():
                self._submit(0)
        elif not self._left and self.layer + 1 < self.layers:
            self._submit(self.layer + 1)
        elif not self._left:
            self.layer, self.steps = None, self.steps + 1
            self.requests = max(0, self.requests - self._rows)
            self._enter()

    def _enter(self) -> None:
        self._said = self.requests > 0
        self.barrier.enter(self._said)
        self.barrier.arrive(self.ends)

    def _submit(self, layer: int) -> None:
        if layer == 0:
            self._rows = min(1, self.requests)
        self.layer, rows = layer, self._rows
        hidden, pairs = np.zeros((rows, HIDDEN), dtype=np.float32), np.zeros(rows, dtype=np.int64)
        for end in self.ends:
            call = channel_of(end).open(wire.size(rows, rows, HIDDEN, False), max(1, rows), 4 * HIDDEN)
            wire.write(call.request, layer, pairs, pairs, None, hidden, worker=self.number + 1)
            channel_of(end).post(call)
            self._left[end.entry.server, call.number] = end


def channel_of(end: ServerConnection) -> Channel:
    channel: Any = end.caller
    assert isinstance(channel, Channel)
    return channel


class Cluster:
    """Workers and servers. The workers have arrived, without work, at each server that they know."""

    def __init__(self, workers: int, servers: int, layers: int = 2) -> None:
        self._layers = layers
        self.servers = [Server(layers) for _ in range(servers)]
        self.workers = [Worker(number, layers) for number in range(workers)]
        self.channels: dict[tuple[int, int], Channel] = {}
        for one in self.workers:
            one.begin()
        for worker in range(workers):
            for server in range(servers):
                self.connect(worker, server)

    def connect(self, worker: int, server: int) -> None:
        channel = self.channels[worker, server] = Channel()
        self.servers[server].listener.waiting.append(channel)
        self.servers[server].turn()
        self.workers[worker].connect(server, channel)

    def restart(self, server: int) -> None:
        """The server's process ends, and another one takes its place. No worker is connected to it."""
        for worker, other in list(self.channels):
            if other == server:
                del self.channels[worker, server]
                self.workers[worker].lose(server)
        self.servers[server] = Server(self._layers)

    def replace(self, worker: int) -> None:
        """The worker's process ends, and another one takes its place. It is connected to no server."""
        for number, server in list(self.channels):
            if number == worker:
                self.channels.pop((worker, server)).closed = True
                self.servers[server].turn()
        self.workers[worker] = Worker(worker, self._layers)
        self.workers[worker].begin()

    def possible(self) -> list[Event]:
        """deliver: a message goes to a server, which acts on it. keep: the server does not look yet.

        answer: a worker takes its answers of a server.
        """
        found = []
        for (worker, server), channel in self.channels.items():
            if channel.posted:
                found += [("deliver", worker, server), ("keep", worker, server)]
            elif channel.arrived:
                found.append(("deliver", worker, server))
            if channel.answers:
                found.append(("answer", worker, server))
        return found

    def happen(self, event: Event) -> None:
        what, worker, server = event
        if what == "answer":
            self.workers[worker].take(server)
            return
        channel = self.channels[worker, server]
        if channel.posted:
            channel.arrived.append(channel.posted.popleft())
        if what == "deliver":
            self.servers[server].turn()

    def settle(self, choose: random.Random | None = None) -> None:
        """Let messages travel until none is under way. choose: in this order. None: as they were sent."""
        while events := self.possible():
            self.happen(events[0] if choose is None else choose.choice(events))

    @property
    def stuck(self) -> bool:
        """Whether a server lets calls wait although no message is under way."""
        return not self.possible() and any(one.service.wait(0.0) is not None for one in self.servers)
