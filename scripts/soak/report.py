"""The outcomes of a run as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from rich import box
from rich.console import Console
from rich.table import Table
from scripts.soak.plan import FREEZE, KILL, KINDS, RESIZE, SEVERAL
from scripts.soak.rounds import Outcome, Pause
from scripts.soak.shapes import PREFILL, SERVER, WORKER

from moesaic.core.cluster_status import ClusterCounters

BAD = "bad connections"
SHORT = {
    f"{KILL}, {SERVER}": "kill server",
    f"{KILL}, {WORKER}": "kill worker",
    f"{KILL}, {PREFILL}": "kill prefill",
    f"{FREEZE}, {SERVER}": "freeze server",
    f"{FREEZE}, {WORKER}": "freeze worker",
    f"{RESIZE}, {SERVER}": "resize servers",
    f"{RESIZE}, {WORKER}": "resize workers",
    f"{RESIZE}, {PREFILL}": "resize prefill",
    SEVERAL: "several kinds",
    BAD: "bad links",
}
"""Names of the kinds of faults as column titles. Each has eight of 80 columns."""
TOGETHER = 6
"""Kinds of faults in one table, which then has 80 columns."""
REDONE = {
    "process_deaths": "processes that died",
    "failovers": "servers given up with rows outstanding",
    "silent_failovers": "of those, given up for their silence",
    "false_failovers": "of those, servers that had not died",
    "resent_pairs": "(row, expert) pairs sent again",
    "moved_requests": "requests moved to another worker",
}


def totals(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Totals of all rounds, by name."""

    def add(what: Callable[[Outcome], float]) -> float:
        return sum(map(what, outcomes))

    counters = {
        one.name: add(lambda outcome, name=one.name: getattr(outcome.counters, name))  # type: ignore[misc]
        for one in fields(ClusterCounters)
    }
    kinds = sorted({kind for outcome in outcomes for kind in outcome.leaks.found})
    exercised = list(dict.fromkeys(name for outcome in outcomes for name in outcome.exercised))
    return {
        "rounds": len(outcomes),
        "rounds that broke off": add(lambda one: one.error is not None),
        "requests sent": add(lambda one: one.requests),
        "requests completed": add(lambda one: one.completed),
        "requests cancelled": add(lambda one: one.cancelled),
        "tokens compared": add(lambda one: one.tokens),
        "answers that are different": add(lambda one: len(one.different)),
        **{text: counters[name] for name, text in REDONE.items()},
        **{name: add(lambda one, n=name: one.exercised.get(n, 0)) for name in exercised},  # type: ignore[misc]
        "longest gap of a stream, s": max((one.longest_gap for one in outcomes), default=0.0),
        **{f"leaked: {kind}": add(lambda one, k=kind: len(one.leaks.found.get(k, []))) for kind in kinds},  # type: ignore[misc]
        "seconds": add(lambda one: one.seconds),
    }


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """What came of the rounds with each kind of fault; every round is in one of the kinds.

    Rounds over bad connections are apart, whatever happened in them. Re-done work: pairs sent again, and
    requests that were computed again elsewhere.
    """
    kinds = [f"{kind}, {role}" for kind, role in KINDS] + [SEVERAL]
    sorts = {name: [one for one in outcomes if _sort(one) == name] for name in [*kinds, BAD]}
    return {name: _row(those) for name, those in (sorts | {"all": list(outcomes)}).items()}


def _sort(outcome: Outcome) -> str:
    return BAD if outcome.bad_connections else outcome.kind


def _row(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "rounds": len(outcomes),
        "faults": sum(len(one.pauses) for one in outcomes),
        "sent": sum(one.requests for one in outcomes),
        "completed": sum(one.completed for one in outcomes),
        "cancelled": sum(one.cancelled for one in outcomes),
        "tokens": sum(one.tokens for one in outcomes),
        "different": sum(len(one.different) for one in outcomes),
        "pairs again": sum(one.counters.resent_pairs for one in outcomes),
        "requests again": sum(one.counters.moved_requests for one in outcomes),
        "longest gap s": max((one.longest_gap for one in outcomes), default=0.0),
        "leaks": sum(len(what) for one in outcomes for what in one.leaks.found.values()),
        "broke off": sum(one.error is not None for one in outcomes),
    }


def as_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Totals, by kind of fault, and every round."""
    rounds = [outcome.as_json() for outcome in outcomes]
    return {"totals": totals(outcomes), "by kind": by_kind(outcomes), "rounds": rounds}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the tables and everything that was wrong."""
    table = Table(title="clusters under faults against one process", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in totals(outcomes).items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    rows = by_kind(outcomes)
    for begin in range(0, len(rows), TOGETHER):
        console.print(_kinds(dict(list(rows.items())[begin : begin + TOGETHER])))
    console.print(_pauses([pause for outcome in outcomes for pause in outcome.pauses]))
    for outcome in outcomes:
        if not outcome.good:
            console.print(f"seed {outcome.seed} ({outcome.shape}):", style="red", highlight=False)
            found = [f"{kind}: {what}" for kind, those in outcome.leaks.found.items() for what in those]
            for line in [*([outcome.error] if outcome.error else []), *outcome.different, *found]:
                console.print(f"  {line}", markup=False, highlight=False)


def _kinds(rows: Mapping[str, dict[str, float]]) -> Table:
    table = Table(title="rounds by kind of fault", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for name in rows:
        table.add_column(SHORT.get(name, name), justify="right")
    for what in next(iter(rows.values())):
        values = [row[what] for row in rows.values()]
        table.add_row(what, *(f"{one:.2f}" if isinstance(one, float) else f"{one:,}" for one in values))
    return table


def _pauses(pauses: list[Pause]) -> Table:
    """Pauses of streams by kind of fault. Only a fault that happened alone has a pause of its own."""
    table = Table(title="faults, and the longest pause of a stream that each fell into")
    for column in ("fault", "of an", "min-replicas", "count", "alone", "median s", "longest s"):
        table.add_column(column, justify="left" if column in ("fault", "of an") else "right")
    for kind, role in KINDS:
        for least in (1, 2):
            these = [one for one in pauses if (one.kind, one.role, one.min_replicas) == (kind, role, least)]
            alone = [one.seconds for one in these if one.alone] or [0.0]
            table.add_row(
                *(kind, role, str(least), str(len(these)), str(sum(one.alone for one in these))),
                *(f"{statistics.median(alone):.2f}", f"{max(alone):.2f}"),
            )
    return table
