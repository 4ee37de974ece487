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
from moesaic.planning.deployment.hosts import topology
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
FREE = LinkModel(0.0, 1e18)
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
    """One deployment."""

    layout: Layout
    seqs: int
    """--max-num-seqs"""
    batched: int
    """--max-num-batched-tokens"""
    kv_tokens: int
    """Tokens of a worker's KV cache."""
    schedule: Schedule = "lockstep"
    inflight: int = 1
    min_replicas: int = 1
    redundant: int = 0
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
        return max(self.min_replicas, self.layout.spread if self.layout.copied else 1)

    def describe(self) -> str:
        """How its processes work together, in words."""
        parts = [self.schedule + (", two batches in flight" if self.inflight == 2 else "")]
        if self.min_replicas > 1:
            parts.append(f"each expert {self.min_replicas} times")
        if self.redundant:
            parts.append(f"{self.redundant} more {'copies' if self.redundant > 1 else 'copy'} in each layer")
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
    def per_million(self) -> float | None:
        """Price of a million generated tokens. None without prices, and without tokens."""
        if self.price is None or not self.figures.throughput:
            return None
        return self.price / 3600 / self.figures.throughput * 1e6

    def busy(self, *kinds: str) -> float:
        """Mean busy share of devices whose names begin with one of these words."""
        found = [share for name, share in self.figures.utilisation.items() if name.startswith(kinds)]
        return float(np.mean(found)) if found else 0.0


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
    _known: dict[tuple[Candidate, tuple[Fault, ...]], Trial] = field(default_factory=dict)

    def trial(self, candidate: Candidate, estimate: Estimate, faults: tuple[Fault, ...] = ()) -> Trial:
        """Simulate a candidate, or return what is known of it. Raises OutOfTime.

        Few layers flatter async, since rows of all layers wait at once. So it is simulated with all layers,
        unless a few of them already give less than `floor`.
        faults: their times count in parts of the measurement, 0 to 1.
        """
        key = candidate, faults
        if key not in self._known:
            found = self._measured(candidate, estimate, faults, None)
            layers = self.model.moe_layers
            if candidate.schedule == "async" and found.layers < layers and found.good_tokens >= self.floor:
                found = self._measured(candidate, estimate, faults, layers)
            self._known[key] = found
        return self._known[key]

    def _measured(
        self, candidate: Candidate, estimate: Estimate, faults: tuple[Fault, ...], layers: int | None
    ) -> Trial:
        """layers: number of layers to simulate. None: as `_few` says."""
        few, scenario = self.scenario(candidate, estimate, layers)
        length = scenario.duration - scenario.warm_up
        at = tuple(replace(one, at=scenario.warm_up + one.at * length) for one in faults)
        figures = self._run(replace(scenario, faults=at), few, candidate)
        return Trial(candidate, figures, few, estimate, candidate.layout.price_per_hour)

    def _run(self, scenario: Scenario, few: int, candidate: Candidate) -> Figures:
        if self.time_over():
            raise OutOfTime
        part, layout = self.model.moe_layers / few, candidate.layout
        several = layout.hosts > 1 and candidate.links
        cluster = SimulatedCluster(
            scenario,
            modelled.few_layers(self.model, few),
            topology=topology(layout, self.spec, part) if several else None,
            folded=part,
        )

        def look() -> None:
            if self.time_over():
                raise OutOfTime

        for moment in range(LOOKS):
            cluster.timeline.at(moment * scenario.duration / LOOKS, look, SAMPLE)
        try:
            return cluster.run()
        finally:
            self.events += cluster.timeline.events

    def scenario(
        self, candidate: Candidate, estimate: Estimate, layers: int | None = None
    ) -> tuple[int, Scenario]:
        """The number of simulated layers, and the scenario of a candidate. layers: that number, if given."""
        warm_up, measured = self._seconds(candidate, estimate)
        few = layers or _few(self.model.moe_layers, (warm_up + measured) / estimate.itl, candidate.layout)
        if self.demand.routing.file is not None:
            few = self.model.moe_layers  # a profile has the shares of each layer
        layout = candidate.layout  # the links between its hosts are those of its topology
        found = modelled.of_layout(self.model, layout, layout.pool.inside, self.demand.context)
        found = modelled.folded(found, self.model.moe_layers, few)
        if not candidate.links:
            found = replace(found, link=FREE)
        return few, Scenario(
            model=self.model.name,
            devices=modelled.tables(found),
            folder=self.demand.folder,
            seed=self.seed,
            duration=warm_up + measured,
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
        most = self.objectives.itl_ms
        itl = 1.3 * estimate.itl if most is None else max(estimate.itl, min(1.3 * estimate.itl, most / 1e3))
        life = self.demand.answer * itl + 2 * estimate.itl
        rate = self.demand.rate
        return life, max(LIVES * life, 0.0 if rate is None else REQUESTS / rate)


def _few(layers: int, steps: float, layout: Layout) -> int:
    """The number of layers to simulate."""
    each = steps * layout.workers * (EVENTS_EACH + EVENTS_OF_CALL * layout.servers)
    return next((few for few in LAYERS if few <= layers and few * each <= EVENTS), min(LAYERS[-1], layers))


def _processes(candidate: Candidate, demand: Demand) -> Mapping[str, Any]:
    """The tables of a scenario that a candidate decides."""
    layout = candidate.layout
    return {
        "workers": Workers(
            count=layout.workers,
            max_num_seqs=candidate.seqs,
            max_num_batched_tokens=candidate.batched,
            max_model_len=demand.longest,
            kv_tokens=min(candidate.kv_tokens, candidate.seqs * (demand.longest + Workers.block_size)),
        ),
        "servers": Servers(count=layout.servers, beside_workers=layout.beside),
        "placement": PlacementTable(
            kind="solver" if candidate.solver else "even",
            solver=candidate.solver or "ours",
            redundant_experts=0 if candidate.solver else candidate.redundant,
            min_replicas=candidate.copies,
        ),
        "schedule": ScheduleTable(
            kind=candidate.schedule, inflight_batches=candidate.inflight, relay=candidate.relay
        ),
    }
