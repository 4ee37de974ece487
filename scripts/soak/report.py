"""The outcomes of a run as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table
from scripts.soak.plan import FREEZE, KILL, SERVER, WORKER
from scripts.soak.rounds import Outcome, Pause

from moesaic.core.cluster import ClusterCounters

REDONE = {
    "process_deaths": "processes that died",
    "failovers": "servers given up with rows outstanding",
    "false_failovers": "of those, servers that had not died",
    "resent_pairs": "(row, expert) pairs sent again",
    "moved_requests": "requests moved to another worker",
}


def totals(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """By name, over all rounds."""

    def add(what: Callable[[Outcome], float]) -> float:
        return sum(map(what, outcomes))

    counters = {
        one.name: add(lambda outcome, name=one.name: getattr(outcome.counters, name))  # type: ignore[misc]
        for one in fields(ClusterCounters)
    }
    kinds = sorted({kind for outcome in outcomes for kind in outcome.leaks.found})
    return {
        "rounds": len(outcomes),
        "rounds that broke off": add(lambda one: one.error is not None),
        "requests sent": add(lambda one: one.requests),
        "requests completed": add(lambda one: one.completed),
        "requests cancelled": add(lambda one: one.cancelled),
        "tokens compared": add(lambda one: one.tokens),
        "answers that are different": add(lambda one: len(one.different)),
        **{text: counters[name] for name, text in REDONE.items()},
        "longest gap of a stream, s": max((one.longest_gap for one in outcomes), default=0.0),
        **{f"leaked: {kind}": add(lambda one, k=kind: len(one.leaks.found.get(k, []))) for kind in kinds},  # type: ignore[misc]
        "seconds": add(lambda one: one.seconds),
    }


def as_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Totals, and every round."""
    return {"totals": totals(outcomes), "rounds": [outcome.as_json() for outcome in outcomes]}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the tables, and what was wrong."""
    table = Table(title="clusters under faults against one process", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in totals(outcomes).items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    console.print(_pauses([pause for outcome in outcomes for pause in outcome.pauses]))
    for outcome in outcomes:
        if not outcome.good:
            console.print(f"seed {outcome.seed} ({outcome.shape}):", style="red", highlight=False)
            found = [f"{kind}: {what}" for kind, those in outcome.leaks.found.items() for what in those]
            for line in [*([outcome.error] if outcome.error else []), *outcome.different, *found]:
                console.print(f"  {line}", markup=False, highlight=False)


def _pauses(pauses: list[Pause]) -> Table:
    """By kind of fault. Only a fault that happened alone has a pause of its own."""
    table = Table(title="faults, and the longest pause of a stream that each fell into")
    for column in ("fault", "of an", "min-replicas", "count", "alone", "median s", "longest s"):
        table.add_column(column, justify="left" if column in ("fault", "of an") else "right")
    for kind in (KILL, FREEZE):
        for role in (SERVER, WORKER):
            for least in (1, 2):
                these = [
                    one for one in pauses if (one.kind, one.role, one.min_replicas) == (kind, role, least)
                ]
                alone = [one.seconds for one in these if one.alone] or [0.0]
                table.add_row(
                    *(kind, role, str(least), str(len(these)), str(sum(one.alone for one in these))),
                    *(f"{statistics.median(alone):.2f}", f"{max(alone):.2f}"),
                )
    return table
