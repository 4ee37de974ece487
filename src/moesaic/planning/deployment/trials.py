"""Simulates candidates: one deployment in virtual time each, with its figures and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from moesaic.core.paced_devices import LinkModel
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment import devices as modelled
from moesaic.planning.deployment.demand import Demand
from moesaic.planning.deployment.estimate import Estimate
from moesaic.planning.deployment.hosts import build_topology
from moesaic.planning.deployment.layouts import Layout
from moesaic.planning.deployment.spec import ClusterSpec
from moesaic.planning.sim.cluster import SimulatedCluster
from moesaic.planning.sim.figures import Figures
from moesaic.planning.sim.scenario import (
    Fault,
    ObjectivesTable,
    PlacementTable,
    Scenario,
    ScheduleTable,
    Servers,
    Workers,
)
from moesaic.planning.sim.timeline import SAMPLE

LAYERS = (8, 4, 2)
"""Numbers of layers that are simulated in place of all. The first whose events are few enough is taken."""
EVENTS = 240_000
"""Events of a simulation that are aimed at."""
FREE_LINK = LinkModel(0.0, 1e18)
"""A link that takes no time."""
LOOKS = 2000
"""Number of moments of a simulation at which the time budget is looked at."""
LIVES = 1.0
"""Length of the measurement, in lives of a request."""
REQUESTS = 100
"""Minimum number of requests that should arrive in the measurement, if they come at a rate."""
EVENTS_EACH, EVENTS_OF_CALL = 3, 9
"""Events of a worker's layer, and of its call of one server."""

Schedule = Literal["barrier", "lockstep", "async"]
Relay = Literal["auto", "always", "off"]


@dataclass(frozen=True)
class Candidate:
    """A layout with the settings of its processes, which can be simulated."""

    layout: Layout
    max_num_seqs: int
    """--max-num-seqs"""
    max_num_batched_tokens: int
    """--max-num-batched-tokens"""
    kv_tokens: int
    """Tokens of a worker's KV cache."""
    schedule: Schedule = "lockstep"
    inflight_batches: int = 1
    min_replicas: int = 1
    redundant_experts: int = 0
    """Further copies of experts in each layer."""
    solver: str | None = None
    """Solver of the placement. None: consecutive experts."""
    relay: Relay = "auto"
    """--relay, where rows leave a host"""
    links: bool = True
    """False: what links would take is left out, to see what it costs. No such deployment exists."""

    @property
    def copies(self) -> int:
        """Minimum number of servers that hold each expert."""
        return max(self.min_replicas, self.layout.attention_hosts if self.layout.is_replicated else 1)

    def describe(self) -> str:
        """How its processes work together, in words."""
        parts = [self.schedule + (", two batches in flight" if self.inflight_batches == 2 else "")]
        if self.min_replicas > 1:
            parts.append(f"each expert {self.min_replicas} times")
        if self.redundant_experts:
            copies = "copies" if self.redundant_experts > 1 else "copy"
            parts.append(f"{self.redundant_experts} more {copies} in each layer")
        if self.relay != "auto":
            parts.append(f"relays {self.relay}")
        if self.solver:
            parts.append(f"placed by {self.solver}")
        return ", ".join(parts)


class OutOfTime(Exception):
    """The time budget ended during a simulation."""


@dataclass(frozen=True)
class Trial:
    """A candidate and what was measured of it."""

    candidate: Candidate
    figures: Figures
    layers: int
    """Layers that were simulated. Each stands for several of the model's."""
    estimate: Estimate
    price: float | None
    """Dollars, or any other unit, for an hour of the hosts."""

    @property
    def good_tokens(self) -> float:
        """Tokens per second of requests that met the objectives; of all requests without objectives."""
        share = self.figures.good_share
        return self.figures.throughput * (1.0 if share is None else share)

    @property
    def price_per_million(self) -> float | None:
        """Price of a million generated tokens. None without prices, and without tokens."""
        if self.price is None or not self.figures.throughput:
            return None
        return self.price / 3600 / self.figures.throughput * 1e6

    def busy_share(self, *kinds: str) -> float:
        """Mean busy share of devices whose names begin with one of these words."""
        shares = [share for name, share in self.figures.utilisation.items() if name.startswith(kinds)]
        return float(np.mean(shares)) if shares else 0.0


@dataclass
class Simulator:
    """Simulates candidates for one demand, until the time is over."""

    model: ModelSizes
    spec: ClusterSpec
    demand: Demand
    objectives: ObjectivesTable
    seed: int = 0
    time_over: Callable[[], bool] = lambda: False
    events: int = 0
    """Events so far."""
    floor: float = 0.0
    """Good tokens/s below which async need not be simulated with all layers."""
    _trials: dict[tuple[Candidate, tuple[Fault, ...]], Trial] = field(default_factory=dict)

    def simulate(self, candidate: Candidate, estimate: Estimate, faults: tuple[Fault, ...] = ()) -> Trial:
        """Simulate a candidate, or return what is known of it. Raises OutOfTime.

        Few layers flatter async, since rows of all layers wait at once. So it is simulated with all layers,
        unless a few of them already give less than `floor`.
        faults: their times count in parts of the measurement, 0 to 1.
        """
        key = candidate, faults
        if key not in self._trials:
            result = self._measure(candidate, estimate, faults, None)
            layers = self.model.moe_layers
            if candidate.schedule == "async" and result.layers < layers and result.good_tokens >= self.floor:
                result = self._measure(candidate, estimate, faults, layers)
            self._trials[key] = result
        return self._trials[key]

    def _measure(
        self, candidate: Candidate, estimate: Estimate, faults: tuple[Fault, ...], layers: int | None
    ) -> Trial:
        """Simulate a candidate. layers: number of layers to simulate. None: as many as `_choose_num_layers`
        says."""
        num_layers, scenario = self.build_scenario(candidate, estimate, layers)
        length = scenario.duration - scenario.warm_up
        shifted_faults = tuple(replace(fault, at=scenario.warm_up + fault.at * length) for fault in faults)
        figures = self._run(replace(scenario, faults=shifted_faults), num_layers, candidate)
        return Trial(candidate, figures, num_layers, estimate, candidate.layout.price_per_hour)

    def _run(self, scenario: Scenario, num_layers: int, candidate: Candidate) -> Figures:
        if self.time_over():
            raise OutOfTime
        part, layout = self.model.moe_layers / num_layers, candidate.layout
        has_host_links = layout.hosts > 1 and candidate.links
        cluster = SimulatedCluster(
            scenario,
            modelled.reduce_layers(self.model, num_layers),
            topology=build_topology(layout, self.spec, part) if has_host_links else None,
            layer_ratio=part,
        )

        def look() -> None:
            if self.time_over():
                raise OutOfTime

        # Nothing interrupts a simulation from outside, so some of its events look at the clock.
        for moment in range(LOOKS):
            cluster.timeline.schedule(moment * scenario.duration / LOOKS, look, SAMPLE)
        try:
            return cluster.run()
        finally:
            self.events += cluster.timeline.events

    def build_scenario(
        self, candidate: Candidate, estimate: Estimate, layers: int | None = None
    ) -> tuple[int, Scenario]:
        """The number of simulated layers, and the scenario of a candidate. layers: that number, if given."""
        warm_up, measurement = self._seconds(candidate, estimate)
        num_layers = layers or _choose_num_layers(
            self.model.moe_layers, (warm_up + measurement) / estimate.itl, candidate.layout
        )
        if self.demand.routing.file is not None:
            num_layers = self.model.moe_layers  # a profile has the shares of each layer
        layout = candidate.layout  # the links between its hosts are those of its topology
        layer_devices = modelled.build_layout_devices(
            self.model, layout, layout.pool.intra_host_link, self.demand.context
        )
        layer_devices = modelled.fold_layers(layer_devices, self.model.moe_layers, num_layers)
        if not candidate.links:
            layer_devices = replace(layer_devices, link=FREE_LINK)
        return num_layers, Scenario(
            model=self.model.name,
            devices=modelled.to_tables(layer_devices),
            folder=self.demand.folder,
            seed=self.seed,
            duration=warm_up + measurement,
            warm_up=warm_up,
            workload=self.demand.workload,
            routing=self.demand.routing,
            objectives=self.objectives,
            **_processes(candidate, self.demand),
        )

    def _seconds(self, candidate: Candidate, estimate: Estimate) -> tuple[float, float]:
        """Seconds of the warm-up and of the measurement: one life of a request, and LIVES of them.

        A life is at least that of the estimate, and at most one at the objective.
        """
        itl_limit_ms = self.objectives.itl_ms
        # An estimate leaves out queues and uneven arrivals, so a life takes longer.
        itl = 1.3 * estimate.itl
        if itl_limit_ms is not None:
            itl = max(estimate.itl, min(itl, itl_limit_ms / 1e3))
        life = self.demand.answer * itl + 2 * estimate.itl
        rate = self.demand.rate
        return life, max(LIVES * life, 0.0 if rate is None else REQUESTS / rate)


def _choose_num_layers(layers: int, steps: float, layout: Layout) -> int:
    """The number of layers to simulate."""
    events_per_layer = steps * layout.workers * (EVENTS_EACH + EVENTS_OF_CALL * layout.servers)
    return next(
        (count for count in LAYERS if count <= layers and count * events_per_layer <= EVENTS),
        min(LAYERS[-1], layers),
    )


def _processes(candidate: Candidate, demand: Demand) -> Mapping[str, Any]:
    """The tables of a scenario that a candidate decides."""
    layout = candidate.layout
    return {
        "workers": Workers(
            count=layout.workers,
            max_num_seqs=candidate.max_num_seqs,
            max_num_batched_tokens=candidate.max_num_batched_tokens,
            max_model_len=demand.longest,
            kv_tokens=min(
                candidate.kv_tokens, candidate.max_num_seqs * (demand.longest + Workers.block_size)
            ),
        ),
        "servers": Servers(count=layout.servers, beside_workers=layout.is_colocated),
        "placement": PlacementTable(
            kind="solver" if candidate.solver else "even",
            solver=candidate.solver or "ours",
            redundant_experts=0 if candidate.solver else candidate.redundant_experts,
            min_replicas=candidate.copies,
        ),
        "schedule": ScheduleTable(
            kind=candidate.schedule, inflight_batches=candidate.inflight_batches, relay=candidate.relay
        ),
    }
