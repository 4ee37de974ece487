"""The report of `moesaic plan --cluster`, as tables or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from moesaic.commands.plan_options import Plan
from moesaic.commands.processes import in_text
from moesaic.commands.tables import numbers
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.serving import list_commands, list_host_commands, list_notes
from moesaic.planning.deployment.trials import Trial
from moesaic.planning.sim.figures import Spread

PLACEHOLDER = "MODEL"
"""What commands serve where the plan was made for a name of sizes."""


def as_json(plan: Deployments, options: Plan) -> str:
    """The plan as one JSON object. Times are in seconds, rates in tokens or requests per second."""
    return json.dumps(
        {
            "model": plan.model.name,
            "cluster": plan.spec.describe(),
            "workload": plan.demand.describe(),
            "objectives": asdict(plan.objectives),
            "seed": options.seed,
            "deployments": [_entry(plan, trial, options) for trial in plan.best_trials(options.top)],
            "ideas": [asdict(verdict) | {"verdict": verdict.line()} for verdict in plan.verdicts],
            "layouts": plan.num_layouts,
            "fitting_layouts": plan.num_fitting_layouts,
            "simulated": len(plan.trials),
            "complete": plan.is_complete,
            "events": plan.events,
            "assumed": _list_assumptions(plan, options),
        }
    )


def _entry(plan: Deployments, trial: Trial, options: Plan) -> Mapping[str, Any]:
    figures, candidate = trial.figures, trial.candidate
    return {
        "layout": candidate.layout.describe(),
        "machine": candidate.layout.pool.name,
        "how": candidate.describe(),
        "devices": candidate.layout.devices,
        "hosts": candidate.layout.hosts,
        "commands": list_commands(plan, candidate, choose_served(options)),
        "per_host": dict(list_host_commands(plan, candidate, choose_served(options))),
        "notes": list_notes(plan, candidate),
        "throughput": figures.throughput,
        "good_tokens": trial.good_tokens,
        "goodput": figures.goodput,
        "good_share": figures.good_share,
        "ttft": asdict(figures.ttft),
        "itl": asdict(figures.itl),
        "utilisation": {"attention": _attention(trial), "experts": _experts(trial)},
        "price_per_hour": trial.price,
        "price_per_million_tokens": trial.price_per_million,
        "simulated_seconds": figures.seconds,
        "simulated_layers": trial.layers,
        "completed_requests": figures.completed,
        "estimated_throughput": trial.estimate.throughput,
    }


def _attention(trial: Trial) -> float:
    return trial.busy_share("device" if trial.candidate.layout.is_colocated else "worker")


def _experts(trial: Trial) -> float:
    return trial.busy_share("device" if trial.candidate.layout.is_colocated else "server")


def as_text(plan: Deployments, options: Plan) -> str:
    """The plan for people: a table of the best deployments, their commands, and the five ideas."""
    trials = plan.best_trials(options.top)
    parts = [_title(plan), in_text(_table(plan, trials))]
    for number, trial in enumerate(trials, 1):
        parts.append("\n".join(_commands(plan, trial, number, choose_served(options))))
    parts.append("\n".join(["The five ideas, switched on and off in the first deployment:", *_ideas(plan)]))
    all_notes = dict.fromkeys(note for trial in trials for note in list_notes(plan, trial.candidate))
    parts.append("\n".join([_search(plan), *_list_assumptions(plan, options), *all_notes]))
    return "\n\n".join(parts)


def _title(plan: Deployments) -> str:
    goals = [
        f"{name} at most {limit:g} ms"
        for name, limit in (
            ("first token", plan.objectives.ttft_ms),
            ("mean between tokens", plan.objectives.itl_ms),
        )
        if limit is not None
    ]
    goal_text = f"a good request: {', '.join(goals)}" if goals else "without objectives every request is good"
    return f"{plan.model.name} on {plan.spec.describe()}\n{plan.demand.describe()}; {goal_text}"


def _table(plan: Deployments, trials: list[Trial]) -> Table:
    prices = ["per million"] if plan.spec.has_prices else []
    columns = ("machines", "tokens/s", "good", "TTFT p50, p90", "ITL p50, p90, p99", "busy")
    table = numbers("The best deployments; times in ms", "", *columns, *prices)
    for number, trial in enumerate(trials, 1):
        figures, layout = trial.figures, trial.candidate.layout
        busy = f"{_attention(trial):.0%}"
        if not layout.is_colocated:
            busy += f", {_experts(trial):.0%}"
        good = "-" if figures.good_share is None else f"{figures.good_share:.0%}"
        price = (
            []
            if not prices
            else ["-" if trial.price_per_million is None else f"{trial.price_per_million:,.2f}"]
        )
        table.add_row(
            str(number),
            f"{layout.devices} x {layout.pool.name}",
            f"{figures.throughput:,.0f}",
            good,
            _milliseconds(figures.ttft, "p50", "p90"),
            _milliseconds(figures.itl, "p50", "p90", "p99"),
            busy,
            *price,
        )
    return table


def _milliseconds(spread: Spread, *names: str) -> str:
    return ", ".join(f"{1e3 * spread.percentiles[name]:,.0f}" for name in names) if spread.count else "-"


def _commands(plan: Deployments, trial: Trial, number: int, model: str) -> list[str]:
    candidate, figures = trial.candidate, trial.figures
    goodput = "" if figures.goodput is None else f"; {figures.goodput:,.2f} good requests/s"
    lines = [f"{number}. {candidate.layout.describe()}, {candidate.describe()}{goodput}"]
    for host, host_commands in list_host_commands(plan, candidate, model):
        if candidate.layout.hosts > 1:
            lines.append(f"  on {host}:")
        for command, count in Counter(host_commands).items():
            lines.append(f"  {command}{f'    # {count} times' if count > 1 else ''}")
    return lines


def _ideas(plan: Deployments) -> list[str]:
    return [f"  {verdict.idea}: {verdict.line()}" for verdict in plan.verdicts]


def choose_served(options: Plan) -> str:
    """The model in commands: as it was given, if it can be served."""
    return PLACEHOLDER if options.model in PUBLISHED_MODELS else str(options.model)


def _search(plan: Deployments) -> str:
    time_note = "" if plan.is_complete else ". The time budget ended the search; give more with --time-budget"
    return (
        f"Of {plan.num_layouts} layouts {plan.num_fitting_layouts} fit, and {len(plan.trials)} deployments "
        f"were simulated ({plan.events:,} events){time_note}."
    )


def _list_assumptions(plan: Deployments, options: Plan) -> list[str]:
    sentences = list(plan.spec.assumptions)
    best = plan.trials[0]
    if best.candidate.layout.pool.curves is None:
        sentences.append(
            "Assumed: devices reach their roofline, which no real one does. Measure yours (docs/planning.md)."
        )
    if best.layers < plan.model.moe_layers:
        sentences.append(
            f"Simulated: {best.layers} layers, each for {plan.model.moe_layers / best.layers:g} of the "
            "model's."
        )
    if options.model in PUBLISHED_MODELS:
        sentences.append(
            f"{options.model} is a name of sizes: put a checkpoint's directory or hub id in place of "
            f"{PLACEHOLDER}."
        )
    return sentences
