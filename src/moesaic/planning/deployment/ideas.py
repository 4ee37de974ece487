"""What each of the five ideas gives in the best deployment: the simulation with it and without it.

Where the simulation cannot have an idea, the verdict is a limit of what it could give, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moesaic.planning.deployment.estimate import Estimate
from moesaic.planning.deployment.layouts import Layout, memory
from moesaic.planning.deployment.trials import Candidate, OutOfTime, Simulator, Trial
from moesaic.planning.sim.scenario import Fault
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.policies import Workload

WORTH = 1.02
"""Ratio of good tokens/s from which an idea is worth it."""
FASTER = 0.95
"""Ratio of mean latencies below which it is, with equal good tokens/s."""
SLOWER = 1 / FASTER
DIES_AT = 0.25
"""When a server dies, as a part of the measurement."""
ENOUGH_EXPERTS = 256
"""Experts of a layer up to which MoE-Lightning's policies are searched: that takes seconds."""
Show = Callable[[str, int, int], None]
EstimateOf = Callable[[Layout], Estimate | None]


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
        """One sentence or two."""
        if self.worth is None:
            return f"not measured: {self.text}"
        return f"worth it here: {self.text}" if self.worth else f"not worth it here, because {self.text}"


def verdicts(
    simulator: Simulator, trials: Sequence[Trial], estimate_of: EstimateOf, show: Show
) -> list[Verdict]:
    """The verdicts on all five ideas. trials: best first."""
    found: list[Verdict] = []
    measuring = _Measuring(simulator, trials, estimate_of)
    for index, (idea, measure) in enumerate(IDEAS.items()):
        show("ideas", index, len(IDEAS))
        try:
            found.append(measure(measuring, idea))
        except OutOfTime:
            found.append(Verdict(idea, None, "the time budget ended; give more with --time-budget"))
    show("ideas", len(IDEAS), len(IDEAS))
    return found


@dataclass(frozen=True)
class _Measuring:
    simulator: Simulator
    trials: Sequence[Trial]
    estimate_of: EstimateOf

    @property
    def best(self) -> Trial:
        return self.trials[0]

    def other(self, candidate: Candidate, *faults: Fault) -> Trial:
        """The trial of another candidate. Its layout must fit."""
        estimate = self.estimate_of(candidate.layout)
        assert estimate is not None, "the layout fits"
        return self.simulator.trial(candidate, estimate, faults)


def compared(idea: str, on: Trial, off: Trial, why: str, why_not: str) -> Verdict:
    """The verdict by two trials. why, why_not: a reason for each outcome."""
    ratio = on.good_tokens / off.good_tokens if off.good_tokens else float(on.good_tokens > 0) + 1
    latency = on.figures.itl.mean / off.figures.itl.mean if off.figures.itl.mean else 1.0
    figures = (
        f"{on.good_tokens:,.0f} good tokens/s with it and {off.good_tokens:,.0f} without, "
        f"{1e3 * on.figures.itl.mean:.1f} and {1e3 * off.figures.itl.mean:.1f} ms between tokens"
    )
    worth = ratio >= WORTH or (ratio > 1 / WORTH and latency <= FASTER)
    reason = why if worth else why_not
    return Verdict(idea, worth, f"{figures}{'; ' if reason else ''}{reason}", ratio)


def _asynchronous(measuring: _Measuring, idea: str) -> Verdict:
    """Asynchronous Expert Parallelism: the schedule async, and lockstep in its place."""
    base = measuring.best.candidate
    if base.layout.servers == base.layout.workers == 1:
        return Verdict(idea, False, "one worker and one server wait for nobody else")
    on = measuring.other(replace(base, schedule="async", inflight=1))
    off = measuring.best
    if base.schedule == "async":
        off = measuring.other(replace(base, schedule="lockstep"))
    runs = (
        f"a run of a server has {on.figures.pairs_per_run:.0f} pairs in place of "
        f"{off.figures.pairs_per_run:.0f}, and servers are {on.busy('server', 'device'):.0%} busy"
    )
    return compared(idea, on, off, f"workers wait less for others; {runs}", runs)


def _lightning(measuring: _Measuring, idea: str) -> Verdict:
    """MoE-Lightning: one device that keeps experts in the memory below it."""
    simulator, best = measuring.simulator, measuring.best
    model, demand, layout = simulator.model, simulator.demand, best.candidate.layout
    hardware, used = layout.pool.hardware, layout.devices
    if model.experts > ENOUGH_EXPERTS:
        fits = f"the model fits into {used} device{'s' if used > 1 else ''}"
        return Verdict(idea, False, f"{fits}; {model.experts} experts a layer are too many to price it here")
    if simulator.time_over():
        raise OutOfTime
    work = Workload(max(1, round(demand.prompt)), max(2, round(demand.answer)), model.number)
    rate = planner.search(model, hardware, work).throughput
    each = best.figures.throughput / used
    batch = (
        f"one {hardware.name} that keeps what does not fit in {hardware.slow.name} is planned to give "
        f"{rate:,.0f} tokens/s, in large batches (moesaic run-batch --fast-memory)"
    )
    if demand.rate is not None or simulator.objectives.itl_ms is not None:
        fits = f"the model fits into {used} device{'s' if used > 1 else ''}, and large batches answer late"
        return Verdict(idea, False, f"{fits}. For jobs without objectives, {batch}")
    text = f"{batch}; each of the {used} devices of the best deployment gives {each:,.0f}"
    return Verdict(idea, rate > each, text, rate / each if each else None)


def _speculative(measuring: _Measuring, idea: str) -> Verdict:
    """Speculative MoE: rows that stay on the device of their experts. The limit: links that take no time."""
    return _without_links(measuring, idea, "a gate's guess can at most save what links take")


def _without_links(measuring: _Measuring, idea: str, what: str) -> Verdict:
    free = measuring.other(replace(measuring.best.candidate, links=False))
    limit = compared(idea, free, measuring.best, "", "")
    gain = max(1.0, limit.gain or 1.0)
    faster = 1 - free.figures.itl.mean / max(measuring.best.figures.itl.mean, 1e-9)
    if not limit.worth:
        why = f"with links that take no time there would be {gain - 1:.1%} more good tokens/s"
        return Verdict(idea, False, f"{what}, and {why} and {max(0.0, faster):.0%} less between tokens", gain)
    text = (
        f"{what}: at most {gain - 1:.0%} more good tokens/s and {max(0.0, faster):.0%} less between tokens. "
        "How much of it, a profile of the model can say (moesaic profile, moesaic place)"
    )
    return Verdict(idea, None, text, gain)


def _service(measuring: _Measuring, idea: str) -> Verdict:
    """Expert-as-a-Service: servers apart from attention, and what the death of one costs."""
    on = next((one for one in measuring.trials if not one.candidate.layout.beside), None)
    if on is None:
        return Verdict(idea, None, "no layout with expert servers of their own was simulated")
    layout = on.candidate.layout
    parts = [_monolithic(measuring, on)]
    death, costs = _death(measuring, on)
    text = "; ".join([part[1] for part in parts if part[1]] + [death])
    ratio = parts[0][0]
    worth = costs or (ratio is not None and ratio >= WORTH)
    if layout.servers == 1 and ratio is None:
        return Verdict(idea, None, text)
    return Verdict(idea, worth, text, ratio)


def _monolithic(measuring: _Measuring, on: Trial) -> tuple[float | None, str]:
    """The ratio to ranks that have attention and experts, and a sentence."""
    layout, pool = on.candidate.layout, on.candidate.layout.pool
    ranks = layout.devices
    if ranks > min(pool.per_host, measuring.simulator.model.experts):
        return None, ""
    together = Layout(pool, ranks, 1, ranks, beside=True)
    estimate = measuring.estimate_of(together)
    if estimate is None:
        return None, f"the model does not fit into {ranks} devices that have both"
    other = Candidate(together, estimate.seqs, estimate.batched, estimate.kv_tokens)
    off = measuring.other(other)
    ratio = on.good_tokens / off.good_tokens if off.good_tokens else None
    words = (
        f"{on.good_tokens:,.0f} good tokens/s with servers of their own, and {off.good_tokens:,.0f} with as "
        "many devices that each have attention and experts"
    )
    return ratio, words


def _death(measuring: _Measuring, on: Trial) -> tuple[str, bool]:
    """What the death of a server costs with two copies of each expert, and whether that is little."""
    layout = on.candidate.layout
    if layout.servers < 2:
        return "one server has no other that could take its place", False
    twice = replace(on.candidate, min_replicas=2, redundant=0, solver=None)
    room = memory(measuring.simulator.model, layout, 2).kv_tokens
    if room < measuring.simulator.demand.longest:
        return "two copies of each expert do not fit, so a dead server stops the requests", False
    twice = replace(twice, kv_tokens=min(twice.kv_tokens, room))
    alive = measuring.other(twice)
    dead = measuring.other(twice, Fault(at=DIES_AT, server=0))
    lost = 1 - dead.good_tokens / alive.good_tokens if alive.good_tokens else 1.0
    copies = alive.good_tokens / on.good_tokens - 1 if on.good_tokens else 0.0
    text = (
        f"with two copies of each expert (--min-replicas 2, {copies:+.1%}) a server that dies and stays away "
        f"costs {max(0.0, lost):.1%} of the good tokens/s"
    )
    return text, lost < 0.5


def _semantic(measuring: _Measuring, idea: str) -> Verdict:
    """Semantic Parallelism: experts beside the requests that choose them. The limit is that of free links."""
    if measuring.best.candidate.layout.servers == 1:
        return Verdict(idea, False, "one server holds all experts")
    return _without_links(measuring, idea, "placement by topics can at most save what links take")


IDEAS: dict[str, Callable[[_Measuring, str], Verdict]] = {
    "Asynchronous Expert Parallelism": _asynchronous,
    "MoE-Lightning": _lightning,
    "Speculative MoE": _speculative,
    "Expert-as-a-Service": _service,
    "Semantic Parallelism": _semantic,
}
