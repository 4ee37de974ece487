"""The expert servers of a simulated cluster: who holds what, who dies and comes back, who is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from moesaic.cluster.balancing import Balancing
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertServerStats
from moesaic.core.placement import Placement
from moesaic.planning.sim.client import SimulatedExperts
from moesaic.planning.sim.front import Front
from moesaic.planning.sim.scenario import Fault, Scenario
from moesaic.planning.sim.server import SimulatedServer
from moesaic.planning.sim.timeline import Timeline
from moesaic.policy.placement import balance

REPORT_SECONDS = 0.2
"""Seconds between two reports of a server, as in `experts.process`."""


def build_layout(layers: int, experts: int, top_k: int, hidden: int, width: int) -> ExpertLayout:
    """The layout of a model that is not here."""
    prefixes = {layer: f"layers.{layer}.experts" for layer in range(layers)}
    return ExpertLayout(prefixes, "gate", "up", "down", hidden, width, experts, top_k, "bfloat16")


def first_placement(
    scenario: Scenario,
    layout: ExpertLayout,
    solved_placement: Placement | None,
    hosts: Mapping[int, str] | None = None,
) -> Placement:
    """The placement at the beginning. solved_placement: by the scenario's solver. hosts: server -> its host.

    Raises ConfigError for a file that does not fit the model or the servers.
    """
    table, servers, layers = scenario.placement, scenario.servers.count, layout.layers
    if table.kind == "round-robin":
        experts_by_server = {
            server: list(range(server, layout.num_experts, servers)) for server in range(servers)
        }
        return Placement(0, layout.num_experts, dict.fromkeys(layers, experts_by_server))
    if table.kind == "even":
        load = np.ones((len(layers), layout.num_experts))
        weights = dict.fromkeys(range(servers), 1.0)
        copies = table.redundant_experts, table.min_replicas
        return balance.place(load, layers, weights, *copies, hosts=hosts)
    placement = solved_placement
    if placement is None:
        assert table.file is not None
        try:
            placement = Placement.read(str(scenario.path(table.file)), servers)
        except ConfigError as error:
            raise ConfigError("placement.file" + str(error).removeprefix("--placement")) from error
    if (len(placement.layers), placement.num_experts) != (len(layers), layout.num_experts):
        got = f"{len(placement.layers)} layers with {placement.num_experts} experts"
        raise ConfigError.field(
            "placement.file", got, f"{len(layers)} layers with {layout.num_experts} experts"
        )
    inner = dict(zip(placement.layers, layers, strict=True))  # routed layers count from 0 here
    return Placement(
        0,
        layout.num_experts,
        {inner[layer]: experts_by_server for layer, experts_by_server in placement.experts_by_layer.items()},
    )


class Fleet:
    """The servers by number. A number that dies gets another process."""

    def __init__(
        self,
        timeline: Timeline,
        scenario: Scenario,
        layout: ExpertLayout,
        placement: Placement,
        make: Callable[[int], SimulatedServer],
        front: Front,
    ) -> None:
        """make: starts the process of a server."""
        self.servers: dict[int, SimulatedServer] = {}
        self.past: list[SimulatedServer] = []
        """Processes that are gone."""
        self.placement = placement
        self.changes: list[tuple[float, str]] = []
        """What happened to the servers, and when."""
        self._timeline = timeline
        self._scenario = scenario
        self._layout = layout
        self._make = make
        self._front = front
        self._clients: list[SimulatedExperts] = []
        self._incarnations: dict[int, int] = {}
        self._changing = False
        self._balancing = Balancing(layout, scenario.cluster, timeline.now)

    def begin(self, clients: list[SimulatedExperts]) -> None:
        """Start the servers, and set what will happen to them."""
        self._clients = clients
        for number in range(self._scenario.servers.count):
            self._start(number)
        self._publish()
        for fault in self._scenario.faults:
            if fault.server is not None:
                self._timeline.schedule(fault.at, partial(self._strike, fault, fault.server))
        if self._scenario.placement.rebalance_interval or self._scenario.placement.autoscale:
            self._timeline.schedule(REPORT_SECONDS, self._look)

    @property
    def all_servers(self) -> list[SimulatedServer]:
        """All processes, past ones first."""
        return [*self.past, *self.servers.values()]

    def _start(self, number: int) -> None:
        self._incarnations[number] = self._incarnations.get(number, 0) + 1
        if number in self.servers:
            self.past.append(self.servers[number])
        self.servers[number] = self._make(number)

    def _publish(self) -> None:
        experts = {server: self.placement.server_experts(server) for server in self.servers}
        for client in self._clients:
            client.update(self.servers, experts)
            client.wake()

    def note(self, text: str) -> None:
        """Keep what happened, and when."""
        self.changes.append((self._timeline.now, text))

    # ---- faults

    def add_client(self, client: SimulatedExperts) -> None:
        """A worker's process began."""
        self._clients.append(client)
        client.update(
            self.servers, {server: self.placement.server_experts(server) for server in self.servers}
        )

    def remove_client(self, client: SimulatedExperts) -> None:
        """A worker's process is gone."""
        self._clients.remove(client)

    def _strike(self, fault: Fault, number: int) -> None:
        server = self.servers.get(number)
        if server is None or not server.alive:
            return
        self.note(f"server {number} {fault.kind}")
        if fault.kind == "freezes":
            assert fault.back is not None
            server.freeze(self._timeline.now + fault.back)
            return
        server.die(silent=fault.kind == "vanishes")
        if fault.back is not None:
            self._timeline.schedule(self._timeline.now + fault.back, lambda: self._return(server))

    def _return(self, dead: SimulatedServer) -> None:
        if self.servers.get(dead.number) is dead:
            self._start(dead.number)
            self.note(f"server {dead.number} is back")
            self._publish()

    # ---- balance

    def _look(self) -> None:
        """What the supervisor does with the servers' reports."""
        now, balancing = self._timeline.now, self._balancing
        self._timeline.schedule(now + REPORT_SECONDS, self._look)
        for number, server in self.servers.items():
            stats = ExpertServerStats(busy_seconds=server.busy_seconds)
            balancing.loads.add_report(number, self._incarnations[number], stats, server.load.tolist())
        balancing.loads.tick(now, self.servers)
        if self._changing:
            return
        weights = dict.fromkeys(self.servers, 1.0)
        waiting = sum(life.queue_seconds is None for life in self._front.lives if not life.has_ended)
        busy = {(n, self._incarnations[n]): server.busy_seconds for n, server in self.servers.items()}
        num_servers = balancing.count_needed_servers(
            now, waiting, busy, len(weights), self._front.missed_tokens
        )
        if num_servers != len(weights):
            self._scale(num_servers)
            return
        new = balancing.plan_rebalance(now, self.placement, weights)
        if new is not None:
            self._move(new, 0.0, f"experts move, placement {new.version}")

    def _scale(self, num_servers: int) -> None:
        numbers = sorted(self.servers)
        new_numbers = range(numbers[-1] + 1, numbers[-1] + 1 + num_servers - len(numbers))
        numbers_left = [*numbers[:num_servers], *new_numbers]
        table, load = self._scenario.placement, self._balancing.loads.window()
        replicas = min(table.min_replicas, len(numbers_left))
        weights = dict.fromkeys(numbers_left, 1.0)
        new = balance.place(
            load, self._layout.layers, weights, table.redundant_experts, replicas, self.placement
        )
        self._move(new, table.start_seconds if new_numbers else 0.0, f"{num_servers} servers", weights)

    def _move(
        self, new: Placement, seconds: float, change: str, servers: Mapping[int, float] | None = None
    ) -> None:
        """Serve by another placement, once its experts are read. seconds: until the reading begins."""
        size = balance.busiest_bytes(balance.moves(self.placement, new), self._layout.expert_bytes)
        rate = 1e9 * self._scenario.placement.read_gb_per_s
        self._changing = True
        self._timeline.schedule(
            self._timeline.now + seconds + size / rate, lambda: self._serve(new, change, servers)
        )

    def _serve(self, new: Placement, change: str, servers: Mapping[int, float] | None) -> None:
        self.placement, self._changing = new, False
        for number in servers or ():
            if number not in self.servers:
                self._start(number)
        if servers is not None:
            for number in self.servers.keys() - servers.keys():
                self.past.append(self.servers.pop(number))
        self.note(change)
        self._publish()
