"""What each of the five ideas gives in the best deployment: the simulation with it and without it.

Where the simulation cannot have an idea, the verdict is a limit of what it could give, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moesaic.planning.deployment.estimate import Estimate
from moesaic.planning.deployment.layouts import Layout, compute_memory
from moesaic.planning.deployment.trials import Candidate, OutOfTime, Simulator, Trial
from moesaic.planning.sim.scenario import Fault
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.policies import Workload

WORTH = 1.02
"""Ratio of good tokens/s from which an idea is worth it."""
FASTER = 0.95
"""Ratio of mean latencies below which it is, with equal good tokens/s."""
SLOWER = 1 / FASTER
# An early death leaves most of the measurement to the servers that remain, whose load is the cost.
DIES_AT = 0.25
"""When a server dies, as a part of the measurement."""
ENOUGH_EXPERTS = 256
"""Experts of a layer up to which MoE-Lightning's policies are searched: that takes seconds."""
Show = Callable[[str, int, int], None]
EstimateLayout = Callable[[Layout], Estimate | None]


@dataclass(frozen=True)
class Verdict:
    """Whether an idea is worth it here."""

    idea: str
    worth: bool | None
    """None: it was not measured."""
    text: str
    """The reason, with figures."""
    gain: float | None = None
    """Good tokens/s with the idea, as a multiple of those without it."""

    def line(self) -> str:
        """The verdict in one or two sentences."""
        if self.worth is None:
            return f"not measured: {self.text}"
        return f"worth it here: {self.text}" if self.worth else f"not worth it here, because {self.text}"


def judge_ideas(
    simulator: Simulator, trials: Sequence[Trial], estimate_layout: EstimateLayout, show: Show
) -> list[Verdict]:
    """The verdicts on all five ideas. trials: best first."""
    verdicts_so_far: list[Verdict] = []
    measuring = _Measuring(simulator, trials, estimate_layout)
    for index, (idea, measure) in enumerate(IDEAS.items()):
        show("ideas", index, len(IDEAS))
        try:
            verdicts_so_far.append(measure(measuring, idea))
        except OutOfTime:
            verdicts_so_far.append(Verdict(idea, None, "the time budget ended; give more with --time-budget"))
    show("ideas", len(IDEAS), len(IDEAS))
    return verdicts_so_far


@dataclass(frozen=True)
class _Measuring:
    simulator: Simulator
    trials: Sequence[Trial]
    estimate_layout: EstimateLayout

    @property
    def best(self) -> Trial:
        return self.trials[0]

    def simulate(self, candidate: Candidate, *faults: Fault) -> Trial:
        """The trial of another candidate. Its layout must fit."""
        estimate = self.estimate_layout(candidate.layout)
        assert estimate is not None, "the layout fits"
        return self.simulator.simulate(candidate, estimate, faults)


def compare_trials(
    idea: str, with_idea: Trial, without_idea: Trial, reason_for: str, reason_against: str
) -> Verdict:
    """The verdict by two trials. reason_for, reason_against: a reason for each outcome."""
    ratio = (
        with_idea.good_tokens / without_idea.good_tokens
        if without_idea.good_tokens
        else float(with_idea.good_tokens > 0) + 1
    )
    latency = (
        with_idea.figures.itl.mean / without_idea.figures.itl.mean if without_idea.figures.itl.mean else 1.0
    )
    figures = (
        f"{with_idea.good_tokens:,.0f} good tokens/s with it and {without_idea.good_tokens:,.0f} without, "
        f"{1e3 * with_idea.figures.itl.mean:.1f} and {1e3 * without_idea.figures.itl.mean:.1f} ms between "
        "tokens"
    )
    # Under light load both give the same tokens/s, so then the lower latency decides.
    worth = ratio >= WORTH or (ratio > 1 / WORTH and latency <= FASTER)
    reason = reason_for if worth else reason_against
    return Verdict(idea, worth, f"{figures}{'; ' if reason else ''}{reason}", ratio)


def _judge_asynchronous(measuring: _Measuring, idea: str) -> Verdict:
    """Asynchronous Expert Parallelism: the schedule async, and lockstep in its place."""
    base = measuring.best.candidate
    if base.layout.servers == base.layout.workers == 1:
        return Verdict(idea, False, "one worker and one server wait for nobody else")
    with_async = measuring.simulate(replace(base, schedule="async", inflight_batches=1))
    without_async = measuring.best
    if base.schedule == "async":
        without_async = measuring.simulate(replace(base, schedule="lockstep"))
    runs = (
        f"a run of a server has {with_async.figures.pairs_per_run:.0f} pairs in place of "
        f"{without_async.figures.pairs_per_run:.0f}, and servers are "
        f"{with_async.busy_share('server', 'device'):.0%} busy"
    )
    return compare_trials(idea, with_async, without_async, f"workers wait less for others; {runs}", runs)


def _judge_lightning(measuring: _Measuring, idea: str) -> Verdict:
    """MoE-Lightning: one device that keeps experts in the memory below it."""
    simulator, best = measuring.simulator, measuring.best
    model, demand, layout = simulator.model, simulator.demand, best.candidate.layout
    hardware, num_devices = layout.pool.hardware, layout.devices
    if model.experts > ENOUGH_EXPERTS:
        fits = f"the model fits into {num_devices} device{'s' if num_devices > 1 else ''}"
        return Verdict(idea, False, f"{fits}; {model.experts} experts a layer are too many to price it here")
    if simulator.time_over():
        raise OutOfTime
    work = Workload(max(1, round(demand.prompt)), max(2, round(demand.answer)), model.number)
    rate = planner.search(model, hardware, work).throughput
    rate_per_device = best.figures.throughput / num_devices
    batch = (
        f"one {hardware.name} that keeps what does not fit in {hardware.slow.name} is planned to give "
        f"{rate:,.0f} tokens/s, in large batches (moesaic run-batch --fast-memory)"
    )
    if demand.rate is not None or simulator.objectives.itl_ms is not None:
        fits = (
            f"the model fits into {num_devices} device{'s' if num_devices > 1 else ''}, and large batches "
            "answer late"
        )
        return Verdict(idea, False, f"{fits}. For jobs without objectives, {batch}")
    text = f"{batch}; each of the {num_devices} devices of the best deployment gives {rate_per_device:,.0f}"
    return Verdict(idea, rate > rate_per_device, text, rate / rate_per_device if rate_per_device else None)


def _judge_speculative(measuring: _Measuring, idea: str) -> Verdict:
    """Speculative MoE: rows that stay on the device of their experts. The limit: links that take no time."""
    return _judge_by_links(measuring, idea, "a gate's guess can at most save what links take")


def _judge_by_links(measuring: _Measuring, idea: str, claim: str) -> Verdict:
    free = measuring.simulate(replace(measuring.best.candidate, links=False))
    limit = compare_trials(idea, free, measuring.best, "", "")
    # Free links cannot make it slower: less than 1 is noise of the simulation.
    gain = max(1.0, limit.gain or 1.0)
    faster = 1 - free.figures.itl.mean / max(measuring.best.figures.itl.mean, 1e-9)
    if not limit.worth:
        reason = f"with links that take no time there would be {gain - 1:.1%} more good tokens/s"
        return Verdict(
            idea, False, f"{claim}, and {reason} and {max(0.0, faster):.0%} less between tokens", gain
        )
    text = (
        f"{claim}: at most {gain - 1:.0%} more good tokens/s and {max(0.0, faster):.0%} less between tokens. "
        "How much of it, a profile of the model can say (moesaic profile, moesaic place)"
    )
    return Verdict(idea, None, text, gain)


def _judge_service(measuring: _Measuring, idea: str) -> Verdict:
    """Expert-as-a-Service: servers apart from attention, and what the death of one costs."""
    separate = next((trial for trial in measuring.trials if not trial.candidate.layout.is_colocated), None)
    if separate is None:
        return Verdict(idea, None, "no layout with expert servers of their own was simulated")
    layout = separate.candidate.layout
    parts = [_compare_monolithic(measuring, separate)]
    death, costs = _measure_death(measuring, separate)
    text = "; ".join([part[1] for part in parts if part[1]] + [death])
    ratio = parts[0][0]
    worth = costs or (ratio is not None and ratio >= WORTH)
    if layout.servers == 1 and ratio is None:
        return Verdict(idea, None, text)
    return Verdict(idea, worth, text, ratio)


def _compare_monolithic(measuring: _Measuring, separate: Trial) -> tuple[float | None, str]:
    """The ratio to ranks that have attention and experts, and a sentence."""
    layout, pool = separate.candidate.layout, separate.candidate.layout.pool
    ranks = layout.devices
    if ranks > min(pool.devices_per_host, measuring.simulator.model.experts):
        return None, ""
    colocated_layout = Layout(pool, ranks, 1, ranks, is_colocated=True)
    estimate = measuring.estimate_layout(colocated_layout)
    if estimate is None:
        return None, f"the model does not fit into {ranks} devices that have both"
    candidate = Candidate(
        colocated_layout, estimate.max_num_seqs, estimate.max_num_batched_tokens, estimate.kv_tokens
    )
    monolithic = measuring.simulate(candidate)
    ratio = separate.good_tokens / monolithic.good_tokens if monolithic.good_tokens else None
    words = (
        f"{separate.good_tokens:,.0f} good tokens/s with servers of their own, and "
        f"{monolithic.good_tokens:,.0f} with as many devices that each have attention and experts"
    )
    return ratio, words


def _measure_death(measuring: _Measuring, separate: Trial) -> tuple[str, bool]:
    """What the death of a server costs with two copies of each expert, and whether that is little."""
    layout = separate.candidate.layout
    if layout.servers < 2:
        return "one server has no other that could take its place", False
    replicated_candidate = replace(separate.candidate, min_replicas=2, redundant_experts=0, solver=None)
    room = compute_memory(measuring.simulator.model, layout, 2).kv_tokens
    if room < measuring.simulator.demand.longest:
        return "two copies of each expert do not fit, so a dead server stops the requests", False
    replicated_candidate = replace(replicated_candidate, kv_tokens=min(replicated_candidate.kv_tokens, room))
    alive = measuring.simulate(replicated_candidate)
    dead = measuring.simulate(replicated_candidate, Fault(at=DIES_AT, server=0))
    lost_share = 1 - dead.good_tokens / alive.good_tokens if alive.good_tokens else 1.0
    copies = alive.good_tokens / separate.good_tokens - 1 if separate.good_tokens else 0.0
    text = (
        f"with two copies of each expert (--min-replicas 2, {copies:+.1%}) a server that dies and stays away "
        f"costs {max(0.0, lost_share):.1%} of the good tokens/s"
    )
    return text, lost_share < 0.5


def _judge_semantic(measuring: _Measuring, idea: str) -> Verdict:
    """Semantic Parallelism: experts beside the requests that choose them. The limit is that of free links."""
    if measuring.best.candidate.layout.servers == 1:
        return Verdict(idea, False, "one server holds all experts")
    return _judge_by_links(measuring, idea, "placement by topics can at most save what links take")


IDEAS: dict[str, Callable[[_Measuring, str], Verdict]] = {
    "Asynchronous Expert Parallelism": _judge_asynchronous,
    "MoE-Lightning": _judge_lightning,
    "Speculative MoE": _judge_speculative,
    "Expert-as-a-Service": _judge_service,
    "Semantic Parallelism": _judge_semantic,
}
