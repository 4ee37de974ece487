"""Draws a simulation as charts: throughput, queues, utilisation and waiting."""

from __future__ import annotations

from moesaic.commands.panels import Line, Panel, bars, lines, page
from moesaic.planning.sim.figures import Figures

TIME_CAPTION = "Of all requests together, with the warm-up."
QUEUE_CAPTION = "Waiting: not admitted yet. Running: they hold cache blocks of an attention worker."


def draw(figures: Figures) -> str:
    """The charts as an SVG."""
    title = f"{figures.model}, schedule {figures.schedule}: {figures.throughput:,.0f} tokens/s"
    samples = figures.samples
    rates = [(sample.time, sample.tokens_per_second) for sample in samples]
    requests = [
        Line("waiting", [(sample.time, sample.waiting) for sample in samples]),
        Line("running", [(sample.time, sample.running) for sample in samples]),
    ]
    pairs = [(sample.time, sample.pairs) for sample in samples]
    return page(
        title,
        [
            lines(
                "Generated tokens over time", "seconds", "tokens/s", [Line("throughput", rates)], TIME_CAPTION
            ),
            lines("Requests over time", "seconds", "requests", requests, QUEUE_CAPTION),
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
    series = [Line(kind, points) for kind, points in kinds.items()]
    caption = "After the warm-up. Where processes share a device, their work counts together."
    return bars("Share of the time that devices compute", "number of the device", "%", series, caption)


def _waiting(figures: Figures) -> Panel:
    causes: dict[str, list[tuple[float, float]]] = {}
    for name, shares in figures.idle.items():
        kind, _, number = name.rpartition(" ")
        for cause, share in shares.items():
            label = f"{kind.rpartition(' ')[2]}: {cause}"
            causes.setdefault(label, []).append((int(number), 100 * share))
    series = [Line(cause, points) for cause, points in causes.items() if any(y for _, y in points)]
    caption = "By cause: a worker waits for experts, a server for calls or for more rows."
    return bars("Share of the time that processes sleep", "number of the process", "%", series, caption)


def _latency(figures: Figures) -> Panel:
    latencies = {"TTFT": figures.ttft, "ITL": figures.itl, "TPOT": figures.tpot}
    series = [
        Line(name, [(float(p[1:]), 1000 * value) for p, value in spread.percentiles.items()])
        for name, spread in latencies.items()
    ]
    ticks = {x: f"p{x:g}" for line in series for x, _ in line.points}
    caption = "First token (TTFT), between tokens (ITL), and a request's mean for each token (TPOT)."
    return lines("Latencies", "percentile", "ms", series, caption, ticks)
