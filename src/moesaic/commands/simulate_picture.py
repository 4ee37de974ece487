"""Draws a simulation as charts: throughput, queues, utilisation and waiting."""

from __future__ import annotations

from moesaic.commands.panels import Line, Panel, bars, lines, page
from moesaic.planning.sim.figures import Figures

OVER_TIME = "Of all requests together, with the warm-up."
QUEUED = "Waiting: not admitted yet. Running: they hold cache blocks of an attention worker."


def draw(figures: Figures) -> str:
    """The charts as an SVG."""
    title = f"{figures.model}, schedule {figures.schedule}: {figures.throughput:,.0f} tokens/s"
    samples = figures.samples
    rates = [(one.time, one.tokens_per_second) for one in samples]
    requests = [
        Line("waiting", [(one.time, one.waiting) for one in samples]),
        Line("running", [(one.time, one.running) for one in samples]),
    ]
    pairs = [(one.time, one.pairs) for one in samples]
    return page(
        title,
        [
            lines(
                "Generated tokens over time", "seconds", "tokens/s", [Line("throughput", rates)], OVER_TIME
            ),
            lines("Requests over time", "seconds", "requests", requests, QUEUED),
            lines(
                "Queues of the expert servers over time",
                "seconds",
                "(row, expert) pairs",
                [Line("waiting", pairs)],
                "Pairs that arrived at some expert server and are not computed yet.",
            ),
            _utilisation(figures),
            _waiting(figures),
            _latency(figures),
        ],
    )


def _utilisation(figures: Figures) -> Panel:
    kinds: dict[str, list[tuple[float, float]]] = {}
    for name, share in figures.utilisation.items():
        kind, _, number = name.rpartition(" ")
        kinds.setdefault(f"{kind}s", []).append((int(number), 100 * share))
    drawn = [Line(kind, points) for kind, points in kinds.items()]
    caption = "After the warm-up. Where processes share a device, their work counts together."
    return bars("Share of the time that devices compute", "number of the device", "%", drawn, caption)


def _waiting(figures: Figures) -> Panel:
    causes: dict[str, list[tuple[float, float]]] = {}
    for name, shares in figures.idle.items():
        kind, _, number = name.rpartition(" ")
        for cause, share in shares.items():
            label = f"{kind.rpartition(' ')[2]}: {cause}"
            causes.setdefault(label, []).append((int(number), 100 * share))
    drawn = [Line(cause, points) for cause, points in causes.items() if any(y for _, y in points)]
    caption = "By cause: a worker waits for experts, a server for calls or for more rows."
    return bars("Share of the time that processes sleep", "number of the process", "%", drawn, caption)


def _latency(figures: Figures) -> Panel:
    shown = {"TTFT": figures.ttft, "ITL": figures.itl, "TPOT": figures.tpot}
    drawn = [
        Line(name, [(float(p[1:]), 1000 * value) for p, value in spread.percentiles.items()])
        for name, spread in shown.items()
    ]
    ticks = {x: f"p{x:g}" for line in drawn for x, _ in line.points}
    caption = "First token (TTFT), between tokens (ITL), and a request's mean for each token (TPOT)."
    return lines("Latencies", "percentile", "ms", drawn, caption, ticks)
