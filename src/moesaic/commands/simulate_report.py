"""The report of `moesaic simulate`, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rich.table import Table

from moesaic.commands.processes import in_text
from moesaic.commands.tables import numbers, pairs
from moesaic.commands.units import in_bytes
from moesaic.planning.sim.figures import Figures, Spread

ROWS = 16
"""Maximum number of devices that are listed one by one."""


def as_json(figures: Figures) -> str:
    """The figures as one JSON object. Units are seconds, bytes and tokens/s."""
    return json.dumps(asdict(figures))


def as_text(figures: Figures) -> str:
    """The figures as tables."""
    parts = [_title(figures), in_text(_speed(figures)), in_text(_latencies(figures))]
    parts += [in_text(_call(figures)), in_text(_devices(figures))]
    if figures.host_links:
        parts.append(in_text(_host_links(figures)))
    if figures.changes:
        parts.append("\n".join(f"{time:10.3f} s  {change}" for time, change in figures.changes) + "\n")
    return "\n".join([*parts, f"Source of the devices' figures: {figures.devices}"])


def _title(figures: Figures) -> str:
    return (
        f"{figures.model}, schedule {figures.schedule}, {figures.seconds:g} simulated seconds "
        f"after the warm-up; {figures.requests:,} requests came and {figures.completed:,} ended"
    )


def _speed(figures: Figures) -> Table:
    rows = {
        "throughput": f"{figures.throughput:,.1f} tokens/s",
        **_goodput(figures),
        "requests in flight": f"{figures.in_flight:,.1f}",
        "rows of an attention run": f"{figures.rows_per_run:,.1f}",
        "pairs of an expert run": f"{figures.pairs_per_run:,.1f}",
        "preemptions": f"{figures.preemptions:,}",
    }
    if figures.partial_runs is not None:
        rows["partial runs"] = f"{figures.partial_runs:.1%} (some of the rows in flight)"
    if figures.failovers:
        rows["failovers"] = (
            f"{figures.failovers}, {figures.silent_failovers} after a timeout; "
            f"{figures.resent_pairs:,} pairs sent again"
        )
    return pairs("Speed", rows)


def _goodput(figures: Figures) -> Mapping[str, str]:
    if figures.goodput is None or figures.good_share is None:
        return {}
    return {"goodput": f"{figures.goodput:,.2f} requests/s, {figures.good_share:.1%} of those that ended"}


def _latencies(figures: Figures) -> Table:
    table = numbers("Latencies, ms", "", "count", "mean", "p50", "p90", "p99")
    latencies: dict[str, Spread] = {
        "time to first token": figures.ttft,
        "  in the queue": figures.queue_seconds,
        "time per output token": figures.tpot,
        "inter-token latency": figures.itl,
    }
    for name, spread in latencies.items():
        values = [spread.mean, *spread.percentiles.values()] if spread.count else []
        cells = [f"{1000 * value:,.2f}" for value in values] or ["-"] * 4
        table.add_row(name, f"{spread.count:,}", *cells)
    return table


def _call(figures: Figures) -> Table:
    call = figures.call
    rows = {
        "to the server": call.link_out,
        "in the server's queue": call.queue,
        "computed": call.compute,
        "back, until the worker looks": call.link_back,
    }
    cells = {name: f"{1000 * seconds:,.3f}" for name, seconds in rows.items()}
    return pairs("Mean time of a (row, expert) pair, ms", cells)


def _host_links(figures: Figures) -> Table:
    """Each direction of the links between hosts."""
    table = numbers("Links between hosts", "", "sent", "share of the time")
    for sender, ends in figures.host_links.items():
        for receiver, link in ends.items():
            table.add_row(f"{sender} to {receiver}", in_bytes(link.size), f"{link.utilisation:.1%}")
    return table


def _devices(figures: Figures) -> Table:
    """Utilisation and waiting. Many devices are summed up as a mean for each kind."""
    table = numbers("Share of the time", "", "computes", "sends", "sent", "sleeps, by what it waits for")
    names = list(figures.utilisation)
    for name in names[:ROWS] if len(names) <= ROWS else ():
        table.add_row(name, *_device(figures, [name]))
    if len(names) > ROWS:
        for kind in dict.fromkeys(name.rpartition(" ")[0] for name in names):
            kind_names = [name for name in names if name.rpartition(" ")[0] == kind]
            table.add_row(f"{len(kind_names)} {kind}s, mean", *_device(figures, kind_names))
    return table


def _device(figures: Figures, names: list[str]) -> tuple[str, str, str, str]:
    """The cells of these devices, as means."""
    count, causes = len(names), dict[str, float]()
    for name in names:
        kind, _, number = name.rpartition(" ")
        processes = {"worker": ["attention worker"], "server": ["expert server"]}
        for process in processes.get(kind, ["attention worker", "expert server"]):
            for cause, share in figures.idle.get(f"{process} {number}", {}).items():
                causes[cause] = causes.get(cause, 0.0) + share / count
    # Shares below 0.05 % are left out at the end, since they would be printed as 0.0 %.
    sent_bytes = sum(sum(figures.link_bytes[name].values()) for name in names) / count
    return (
        f"{sum(figures.utilisation[name] for name in names) / count:.1%}",
        f"{sum(figures.link_utilisation[name] for name in names) / count:.1%}",
        in_bytes(sent_bytes),
        ", ".join(f"{cause} {share:.1%}" for cause, share in sorted(causes.items()) if share >= 0.0005),
    )
