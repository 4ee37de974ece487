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
from moesaic.planning.deployment.hosts import find_device_link
from moesaic.planning.deployment.ideas import Verdict
from moesaic.planning.deployment.layouts import Layout, compute_memory, list_layouts
from moesaic.planning.deployment.spec import FLAG, ClusterSpec
from moesaic.planning.deployment.trials import Candidate, OutOfTime, Simulator, Trial
from moesaic.planning.sim.scenario import ObjectivesTable, Scenario
from moesaic.planning.sim.shape import Shape

FIRST, SECOND = 6, 2
"""Layouts of round 1, and of round 2."""
SEARCH_SHARE = 0.65
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
    num_layouts: int
    """Layouts that were estimated, those included that do not fit."""
    num_fitting_layouts: int
    """Layouts whose devices have room for the model."""
    is_complete: bool
    """False if the time budget ended the search."""
    events: int
    verdicts: list[Verdict] = field(default_factory=list)

    def best_trials(self, count: int) -> list[Trial]:
        """The best trial of each of the best layouts."""
        best_by_layout: dict[Layout, Trial] = {}
        for trial in self.trials:
            best_by_layout.setdefault(trial.candidate.layout, trial)
        return list(best_by_layout.values())[:count]


@dataclass
class Search:
    """Searches the best deployments for one model, cluster and demand. `clock` gives seconds."""

    model: ModelSizes
    spec: ClusterSpec
    demand: Demand
    objectives: ObjectivesTable
    budget: float
    seed: int
    clock: Callable[[], float]
    show: Show = lambda work, units, total: None
    _trials: dict[Candidate, Trial] = field(default_factory=dict)
    _complete: bool = True
    _num_trials: int = 0

    def run(self) -> Deployments:
        """Raises ConfigError if the model does not fit."""
        began = self.clock()
        self._deadline = began + SEARCH_SHARE * self.budget
        self._simulator = Simulator(
            self.model, self.spec, self.demand, self.objectives, self.seed, self._time_over
        )
        estimates, layouts = self._estimate_layouts()
        self._try(
            Candidate(
                estimate.layout, estimate.max_num_seqs, estimate.max_num_batched_tokens, estimate.kv_tokens
            )
            for estimate in self._select_first_round(estimates)
        )
        for count in (SECOND, 1):
            best = self._rank_trials()[:count]
            self._try(candidate for trial in best for candidate in self._list_variants(trial.candidate))
        trials = self._rank_trials()
        if not trials:
            raise ConfigError.field("--time-budget", self.budget, "more seconds: not one simulation ended")
        self._deadline = began + self.budget
        verdicts = ideas.judge_ideas(self._simulator, trials, self._estimate_layout, self.show)
        return Deployments(
            self.model,
            self.spec,
            self.demand,
            self.objectives,
            trials,
            layouts,
            len(estimates),
            self._complete,
            self._simulator.events,
            verdicts,
        )

    def _time_over(self) -> bool:
        return self.clock() >= self._deadline

    # ---- estimates

    def _estimate_layouts(self) -> tuple[list[Estimate], int]:
        """The estimates of the layouts that fit, and the number of all layouts."""
        self.show("estimates", 0, 0)
        self._estimates = Estimates(self.model, self.demand, self._shares(), self._itl)
        layouts = list(list_layouts(self.spec, self.model))
        estimates = [
            estimate for layout in layouts if (estimate := self._estimate_layout(layout)) is not None
        ]
        if not estimates:
            raise ConfigError.field(FLAG, self.spec.describe(), self._describe_need())
        return estimates, len(layouts)

    def _estimate_layout(self, layout: Layout) -> Estimate | None:
        """The estimate of a layout, or None if it does not fit."""
        tokens = compute_memory(self.model, layout).kv_tokens
        layout_devices = devices.build_layout_devices(
            self.model, layout, find_device_link(layout, self.spec), self.demand.context
        )
        return self._estimates.estimate(layout, layout_devices, tokens)

    @property
    def _itl(self) -> float | None:
        return None if self.objectives.itl_ms is None else 1e-3 * self.objectives.itl_ms

    def _shares(self) -> np.ndarray:
        """[layers, E] of the experts' choices, as the simulation draws them."""
        # The shares depend on seed, model and routing alone, so any devices and workload will do.
        plain = Scenario(
            model=self.model.name,
            devices="h100",
            folder=self.demand.folder,
            seed=self.seed,
            routing=self.demand.routing,
            workload=replace(self.demand.workload, kind="closed", clients=1, rate=None, file=None),
        )
        return Shape.from_scenario(plain, self.model).routes.shares

    def _describe_need(self) -> str:
        size = self.model.weights / GIB
        room = max(pool.devices * pool.hardware.fast.room for pool in self.spec.pools) / GIB
        return (
            f"devices with room for the model and one request: {self.model.name} has {size:,.0f} GiB of "
            f"weights, and {room:,.0f} GiB are usable; with --hardware in place of --cluster, moesaic plan "
            "keeps experts in a slower memory"
        )

    def _select_first_round(self, estimates: list[Estimate]) -> list[Estimate]:
        """The layouts of round 1.

        They are the two with the best estimates for each number of devices, and one with shared devices. If a
        rate is asked for, those that reach it with few devices come first; else those with the most tokens/s.
        """
        first_estimates: list[Estimate] = []
        for _, group in _group_by_devices(estimates):
            group.sort(
                key=lambda candidate_estimate: (
                    not candidate_estimate.in_time,
                    -candidate_estimate.throughput,
                )
            )
            first_estimates += group[:2]
            first_estimates += [
                candidate_estimate
                for candidate_estimate in group
                if candidate_estimate.layout.is_colocated and candidate_estimate not in group[:2]
            ][:1]
        target_rate = None if self.demand.rate is None else self.demand.rate * self.demand.answer

        def order(estimate: Estimate) -> tuple[float, ...]:
            if target_rate is not None and estimate.in_time and estimate.throughput >= HEADROOM * target_rate:
                return (
                    0.0,
                    estimate.layout.price_per_hour or 0.0,
                    float(estimate.layout.devices),
                    -estimate.throughput,
                )
            return 1.0 + (not estimate.in_time), 0.0, 0.0, -estimate.throughput

        return sorted(first_estimates, key=order)[:FIRST]

    # ---- simulations

    def _try(self, candidates: Iterator[Candidate]) -> None:
        """Simulate these candidates, as long as there is time."""
        new_candidates = list(dict.fromkeys(trial for trial in candidates if trial not in self._trials))
        for index, candidate in enumerate(new_candidates):
            self.show("simulations", self._num_trials, self._num_trials + len(new_candidates) - index)
            estimate = self._estimate_layout(candidate.layout)
            assert estimate is not None
            best = max((trial.good_tokens for trial in self._trials.values()), default=0.0)
            self._simulator.floor = (1 - EQUAL) * best
            try:
                self._trials[candidate] = self._simulator.simulate(candidate, estimate)
            except OutOfTime:
                self._complete = False
                return
            self._num_trials += 1
        self.show("simulations", self._num_trials, self._num_trials)

    def _rank_trials(self) -> list[Trial]:
        """The trials, best first: the most tokens/s of good requests. Of equally good ones the cheaper one,
        then the one with fewer devices, then the one with the lower latency, then the plainer one."""
        remaining = sorted(self._trials.values(), key=lambda trial: -trial.good_tokens)
        ranking: list[Trial] = []
        while remaining:
            best = remaining[0].good_tokens
            equal = [trial for trial in remaining if trial.good_tokens >= (1 - EQUAL) * best]
            equal.sort(key=_cost_order)
            ranking.append(equal[0])
            remaining.remove(equal[0])
        return ranking

    def _list_variants(self, base: Candidate) -> Iterator[Candidate]:
        """Candidates that differ from this one in one thing."""
        yield replace(base, schedule="lockstep", inflight_batches=1)
        if base.max_num_seqs > 1:
            yield replace(base, schedule="lockstep", inflight_batches=2)
        yield replace(base, schedule="async", inflight_batches=1)
        if base.layout.hosts > 1 and not base.layout.is_replicated:
            yield replace(base, relay="always")
            yield replace(base, relay="off")
        if base.layout.servers > 1 and not base.solver and not base.layout.is_replicated:
            extra_copies = max(1, self.model.experts // 8)
            if self._fits(base, redundant=extra_copies):
                yield replace(base, redundant_experts=extra_copies)
        if self.demand.routing.kind == "profile" and not base.redundant_experts and base.layout.servers > 1:
            yield replace(base, solver=SOLVER)

    def _fits(self, base: Candidate, redundant: int) -> bool:
        return (
            compute_memory(self.model, base.layout, base.min_replicas, redundant).kv_tokens
            >= base.kv_tokens // 2
        )


def _cost_order(trial: Trial) -> tuple[float, ...]:
    """Sorts equally good trials: by price, devices, latency in steps of EQUAL, and settings that differ from
    the defaults."""
    candidate = trial.candidate
    num_changes = (
        (candidate.schedule != "lockstep") + candidate.inflight_batches + bool(candidate.redundant_experts)
    )
    num_changes += candidate.relay != "auto"
    # Steps of the logarithm make latencies equal that differ by less than the share EQUAL.
    latency = round(math.log(trial.figures.itl.mean) / EQUAL) if trial.figures.itl.mean else 0
    price = candidate.layout.price_per_hour or 0.0
    return price, float(candidate.layout.devices), float(latency), float(num_changes + bool(candidate.solver))


def _group_by_devices(estimates: list[Estimate]) -> list[tuple[int, list[Estimate]]]:
    groups: dict[int, list[Estimate]] = {}
    for estimate in estimates:
        groups.setdefault(estimate.layout.devices, []).append(estimate)
    return sorted(groups.items())
