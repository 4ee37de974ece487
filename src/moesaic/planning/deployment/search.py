"""Searches deployments: estimates all layouts, simulates the best few, then changes one thing at a time.

    round 1   lockstep in the layouts with the best estimates
    round 2   other schedules, more copies and solved placements in the best layouts of round 1
    round 3   the same in the best candidate of round 2

Nothing is drawn at random but requests and routing, by the seed. So the same inputs give the same plan,
unless the time budget ends the search early.

Question: How does `plan --cluster` search?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment import devices, ideas
from moesaic.planning.deployment.demand import Demand
from moesaic.planning.deployment.estimate import Estimate, Estimates
from moesaic.planning.deployment.hosts import device_link
from moesaic.planning.deployment.ideas import Verdict
from moesaic.planning.deployment.layouts import Layout, every, memory
from moesaic.planning.deployment.spec import FLAG, ClusterSpec
from moesaic.planning.deployment.trials import Candidate, OutOfTime, Simulator, Trial
from moesaic.planning.sim.scenario import ObjectivesTable, Scenario
from moesaic.planning.sim.shape import Shape

FIRST, SECOND = 6, 2
"""Layouts of round 1, and of round 2."""
SEARCHING = 0.65
"""Share of the time budget for the search. The rest is for the verdicts."""
HEADROOM = 1.15
"""Estimated tokens/s over those that are asked for, from which a smaller layout is preferred."""
EQUAL = 0.03
"""Difference of goodput below which the cheaper of two candidates is the better one."""
Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, units done, units in total)."""
SOLVER = "eplb"
"""Solver of placements, by load alone: the simulation does not know which tokens choose experts together."""
GIB = 2.0**30


@dataclass(frozen=True)
class Deployments:
    """The result of a search."""

    model: ModelSizes
    spec: ClusterSpec
    demand: Demand
    objectives: ObjectivesTable
    trials: list[Trial]
    """What was simulated, best first."""
    layouts: int
    """Layouts that were estimated, those included that do not fit."""
    fitting: int
    """Layouts whose devices have room for the model."""
    complete: bool
    """False if the time budget ended the search."""
    events: int
    verdicts: list[Verdict] = field(default_factory=list)

    def best(self, count: int) -> list[Trial]:
        """The best trial of each of the best layouts."""
        found: dict[Layout, Trial] = {}
        for trial in self.trials:
            found.setdefault(trial.candidate.layout, trial)
        return list(found.values())[:count]


@dataclass
class Search:
    """One search. `clock` gives seconds."""

    model: ModelSizes
    spec: ClusterSpec
    demand: Demand
    objectives: ObjectivesTable
    budget: float
    seed: int
    clock: Callable[[], float]
    show: Show = lambda what, done, total: None
    _trials: dict[Candidate, Trial] = field(default_factory=dict)
    _complete: bool = True
    _done: int = 0

    def run(self) -> Deployments:
        """Raises ConfigError if the model does not fit."""
        began = self.clock()
        self._deadline = began + SEARCHING * self.budget
        self._simulator = Simulator(
            self.model, self.spec, self.demand, self.objectives, self.seed, self._time_over
        )
        found, layouts = self._estimated()
        self._try(Candidate(one.layout, one.seqs, one.batched, one.kv_tokens) for one in self._first(found))
        for count in (SECOND, 1):
            best = self._ranked()[:count]
            self._try(other for trial in best for other in self._others(trial.candidate))
        trials = self._ranked()
        if not trials:
            raise ConfigError.field("--time-budget", self.budget, "more seconds: not one simulation ended")
        self._deadline = began + self.budget
        verdicts = ideas.verdicts(self._simulator, trials, self._estimates_of, self.show)
        return Deployments(
            self.model,
            self.spec,
            self.demand,
            self.objectives,
            trials,
            layouts,
            len(found),
            self._complete,
            self._simulator.events,
            verdicts,
        )

    def _time_over(self) -> bool:
        return self.clock() >= self._deadline

    # ---- estimates

    def _estimated(self) -> tuple[list[Estimate], int]:
        """The estimates of the layouts that fit, and the number of all layouts."""
        self.show("estimates", 0, 0)
        self._estimates = Estimates(self.model, self.demand, self._shares(), self._itl)
        layouts = list(every(self.spec, self.model))
        found = [one for layout in layouts if (one := self._estimates_of(layout)) is not None]
        if not found:
            raise ConfigError.field(FLAG, self.spec.describe(), self._needed())
        return found, len(layouts)

    def _estimates_of(self, layout: Layout) -> Estimate | None:
        """The estimate of a layout, or None if it does not fit."""
        tokens = memory(self.model, layout).kv_tokens
        modelled = devices.of_layout(self.model, layout, device_link(layout, self.spec), self.demand.context)
        return self._estimates.of(layout, modelled, tokens)

    @property
    def _itl(self) -> float | None:
        return None if self.objectives.itl_ms is None else 1e-3 * self.objectives.itl_ms

    def _shares(self) -> np.ndarray:
        """[layers, E] of the experts' choices, as the simulation draws them."""
        plain = Scenario(
            model=self.model.name,
            devices="h100",
            folder=self.demand.folder,
            seed=self.seed,
            routing=self.demand.routing,
            workload=replace(self.demand.workload, kind="closed", clients=1, rate=None, file=None),
        )
        return Shape.of(plain, self.model).routes.shares

    def _needed(self) -> str:
        size = self.model.weights / GIB
        room = max(pool.devices * pool.hardware.fast.room for pool in self.spec.pools) / GIB
        return (
            f"devices with room for the model and one request: {self.model.name} has {size:,.0f} GiB of "
            f"weights, and {room:,.0f} GiB are usable; with --hardware in place of --cluster, moesaic plan "
            "keeps experts in a slower memory"
        )

    def _first(self, found: list[Estimate]) -> list[Estimate]:
        """The layouts of round 1.

        Of each number of devices the two with the best estimates, and one with shared devices. If a rate is
        asked for, those that reach it with few devices come first; else those with the most tokens/s.
        """
        kept: list[Estimate] = []
        for _, group in _grouped(found):
            group.sort(key=lambda one: (not one.in_time, -one.throughput))
            kept += group[:2]
            kept += [one for one in group if one.layout.beside and one not in group[:2]][:1]
        wanted = None if self.demand.rate is None else self.demand.rate * self.demand.answer

        def order(one: Estimate) -> tuple[float, ...]:
            if wanted is not None and one.in_time and one.throughput >= HEADROOM * wanted:
                return 0.0, one.layout.price_per_hour or 0.0, float(one.layout.devices), -one.throughput
            return 1.0 + (not one.in_time), 0.0, 0.0, -one.throughput

        return sorted(kept, key=order)[:FIRST]

    # ---- simulations

    def _try(self, candidates: Iterator[Candidate]) -> None:
        """Simulate these candidates, as long as there is time."""
        wanted = list(dict.fromkeys(one for one in candidates if one not in self._trials))
        for index, candidate in enumerate(wanted):
            self.show("simulations", self._done, self._done + len(wanted) - index)
            estimate = self._estimates_of(candidate.layout)
            assert estimate is not None
            best = max((one.good_tokens for one in self._trials.values()), default=0.0)
            self._simulator.floor = (1 - EQUAL) * best
            try:
                self._trials[candidate] = self._simulator.trial(candidate, estimate)
            except OutOfTime:
                self._complete = False
                return
            self._done += 1
        self.show("simulations", self._done, self._done)

    def _ranked(self) -> list[Trial]:
        """The trials, best first: the most tokens/s of good requests. Of equally good ones the cheaper one,
        then the one with fewer devices, then the one with the lower latency, then the plainer one."""
        left = sorted(self._trials.values(), key=lambda one: -one.good_tokens)
        found: list[Trial] = []
        while left:
            best = left[0].good_tokens
            equal = [one for one in left if one.good_tokens >= (1 - EQUAL) * best]
            equal.sort(key=_cheapest)
            found.append(equal[0])
            left.remove(equal[0])
        return found

    def _others(self, base: Candidate) -> Iterator[Candidate]:
        """Candidates that differ from this one in one thing."""
        yield replace(base, schedule="lockstep", inflight=1)
        if base.seqs > 1:
            yield replace(base, schedule="lockstep", inflight=2)
        yield replace(base, schedule="async", inflight=1)
        if base.layout.hosts > 1 and not base.layout.copied:
            yield replace(base, relay="always")
            yield replace(base, relay="off")
        if base.layout.servers > 1 and not base.solver and not base.layout.copied:
            more = max(1, self.model.experts // 8)
            if self._fits(base, redundant=more):
                yield replace(base, redundant=more)
        if self.demand.routing.kind == "profile" and not base.redundant and base.layout.servers > 1:
            yield replace(base, solver=SOLVER)

    def _fits(self, base: Candidate, redundant: int) -> bool:
        return memory(self.model, base.layout, base.min_replicas, redundant).kv_tokens >= base.kv_tokens // 2


def _cheapest(trial: Trial) -> tuple[float, ...]:
    """Sorts equally good trials: by price, devices, latency in steps of EQUAL, and settings that differ from
    the defaults."""
    candidate = trial.candidate
    changed = (candidate.schedule != "lockstep") + candidate.inflight + bool(candidate.redundant)
    changed += candidate.relay != "auto"
    latency = round(math.log(trial.figures.itl.mean) / EQUAL) if trial.figures.itl.mean else 0
    price = candidate.layout.price_per_hour or 0.0
    return price, float(candidate.layout.devices), float(latency), float(changed + bool(candidate.solver))


def _grouped(found: list[Estimate]) -> list[tuple[int, list[Estimate]]]:
    groups: dict[int, list[Estimate]] = {}
    for one in found:
        groups.setdefault(one.layout.devices, []).append(one)
    return sorted(groups.items())
