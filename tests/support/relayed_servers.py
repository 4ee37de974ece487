"""Expert servers of another host and a client, in one process. The test turns the servers by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from moesaic.config import RelayUse
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Way
from moesaic.experts.answer_check import AnswerCheck
from moesaic.experts.backend import CallPairs
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.relay import Relay
from moesaic.experts.remote import RemoteExperts
from moesaic.experts.server import ExpertServer
from moesaic.policy.fleet.replicas import Replicas, ReplicaTimeout
from moesaic.policy.scheduling.microqueue import MostTokensFirst
from moesaic.policy.scheduling.schedulers.expert_server import EnoughPairs, ExpertServerScheduler
from moesaic.transport.calls import Caller
from moesaic.transport.listening import Listener, connect
from moesaic.transport.wakeup import Wakeup

SECRET = b"a secret of the tests"
EXPERTS, HIDDEN, TOP_K = 6, 3, 4
LAYOUT = ExpertLayout({0: "a"}, "gate", "up", "down", HIDDEN, 2, EXPERTS, TOP_K, "float32")
THERE = Way(LinkModel(1e-4, 1e9), on_one_host=False, host="b")
PATIENCE = 60.0
"""Seconds after which something hangs."""
TIMEOUT = ReplicaTimeout(floor=10.0, unknown=10.0, ceiling=10.0)
"""Of the client's clock, which the test sets."""
APART = {server: {0: [2 * server, 2 * server + 1]} for server in range(3)}
"""Three servers with two experts each."""
TWICE = {server: {0: [one % EXPERTS for one in range(2 * server, 2 * server + 4)]} for server in range(3)}
"""Three servers with four experts each, so that each expert is on two."""


class Backend:
    """Expert e multiplies by e + 1, or answers NaN."""

    name = "multiplies"

    def __init__(self) -> None:
        self.resident_experts: dict[int, list[int]] = {0: list(range(EXPERTS))}
        self.nan_for: Sequence[int] = ()

    def load(self, experts_by_layer: object) -> None: ...

    def keep_only(self, experts_by_layer: object) -> None: ...

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        for part in parts:
            part.results[part.result_rows] = part.hidden[part.rows] * (part.experts[:, None] + 1)
            part.results[part.result_rows[np.isin(part.experts, self.nan_for)]] = np.nan


class Dialling:
    """A Connector without threads. What was started is connected when its owner looks."""

    def __init__(self, wakeup: Wakeup) -> None:
        self.wakeup, self.reachable = wakeup, True
        self.wanted: list[ServerEntry] = []

    def start(self, entry: ServerEntry, secret: bytes) -> None:
        self.wanted.append(entry)
        self.wakeup.ring()

    def stop(self, server: int) -> None:
        self.wanted = [entry for entry in self.wanted if entry.server != server]

    def take_connections(self) -> list[tuple[ServerEntry, Caller]]:
        found: list[tuple[ServerEntry, Caller]] = []
        wanted, self.wanted = self.wanted, []
        for entry in wanted if self.reachable else ():
            with contextlib.suppress(ConnectionLost):
                found.append((entry, connect(entry.endpoint.address, SECRET, "shm", heap_bytes=1 << 20)))
        return found


class FarHost:
    """Three servers of a host, and a client on another one."""

    def __init__(
        self,
        folder: Path,
        held: dict[int, dict[int, list[int]]] = APART,
        far: str = "012",
        relay: RelayUse = "always",
    ) -> None:
        """held: server -> layer -> experts. far: the servers of the other host. relay: of the client."""
        self.held, self.now, self.use = held, 0.0, relay
        self.backends = [Backend() for _ in range(3)]
        self.entries = [ServerEntry(number, 1, Endpoint(f"unix:{folder}/{number}")) for number in range(3)]
        self.rings = [Wakeup() for _ in range(3)]
        self.connectors = [Dialling(ring) for ring in self.rings]
        self.relays = [
            Relay(connector, ring, HIDDEN)  # type: ignore[arg-type]
            for connector, ring in zip(self.connectors, self.rings, strict=True)
        ]
        self.servers = [
            ExpertServer(
                LAYOUT,
                self.backends[number],  # type: ignore[arg-type]
                Listener(f"unix:{folder}/{number}", SECRET),
                ExpertServerScheduler(LAYOUT.layers, MostTokensFirst(), EnoughPairs()),
                time.monotonic,
                relay=self.relays[number],
            )
            for number in range(3)
        ]
        self.alive = {0, 1, 2}
        self.ways = {server: THERE for server in range(3) if str(server) in far}
        self.clients: list[RemoteExperts] = []
        self.client = self.connect()
        self.introduce()

    def connect(self) -> RemoteExperts:
        """A further client, connected to all servers."""
        wakeup = Wakeup()
        client = RemoteExperts(
            LAYOUT,
            Replicas(TIMEOUT, pair_bytes=1000),
            Dialling(wakeup),  # type: ignore[arg-type]
            wakeup,
            lambda: self.now,
            check=AnswerCheck(lambda layer, expert, row: True),
            relay=self.use,
        )
        self.clients.append(client)
        client.update(Directory(1, self.entries, self.held, ways=self.ways), SECRET)
        self.until(lambda: client._replicas.connected == {0, 1, 2})
        return client

    def introduce(self) -> None:
        """Each server knows the others."""
        for number, relay in enumerate(self.relays):
            relay.update({one.server: one for one in self.entries if one.server != number}, SECRET)

    def meet(self) -> None:
        """Every relay is connected to its neighbours, and the host does not rest any more."""
        for number, relay in enumerate(self.relays):
            for other in {0, 1, 2} - {number}:
                relay._dial(other)
        self.until(
            lambda: all(
                len(one._neighbours) == 2 and all(n.greeting is None for n in one._neighbours.values())
                for one in self.relays
            )
        )
        self.now += 5.0

    def submit(
        self, rows: int = 3, sums: bool = False, client: RemoteExperts | None = None
    ) -> tuple[RequestHandle, torch.Tensor]:
        """A request, and what must come back: [n, k, h], or [n, h] for sums."""
        hidden = torch.arange(1, rows * HIDDEN + 1, dtype=torch.float32).reshape(rows, HIDDEN) / 8
        ids = torch.tensor([[(row + slot) % EXPERTS for slot in range(TOP_K)] for row in range(rows)])
        answers = hidden[:, None] * (ids[:, :, None] + 1)
        weights = (torch.arange(rows * TOP_K, dtype=torch.float32) + 1).reshape(rows, TOP_K) / 4
        request = ExpertRequest(0, hidden, ids, weights=weights if sums else None)
        wanted = (weights[:, :, None] * answers).sum(1) if sums else answers
        return (client or self.client).submit(request), wanted

    def turn(self, *servers: int) -> None:
        """One turn of these servers, by default of all that live."""
        for server in servers or sorted(self.alive):
            self.servers[server].turn(0.001)

    def until(self, done: Callable[[], object], *servers: int) -> None:
        """Turn servers until something is so. Clients look at their connections."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, "nothing happened"
            self.turn(*servers)
            for client in self.clients:
                client._progress()

    def answer(
        self, handle: RequestHandle, *servers: int, client: RemoteExperts | None = None
    ) -> torch.Tensor:
        """What comes back when these servers turn."""
        asked = client or self.client
        self.until(lambda: not asked._submissions[handle.number].num_missing, *servers)
        found = asked.rows(handle).clone()
        asked.release(handle)
        return found

    def kill(self, server: int) -> None:
        """A server dies: all of its connections end."""
        self.alive.discard(server)
        self.servers[server].close()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()
