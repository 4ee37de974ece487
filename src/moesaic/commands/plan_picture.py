"""Draws a plan as charts: rooflines with their turning points, throughput by memory, a map of policies.

The charts are MoE-Lightning's Figures 4, 5, 1 and 10, for the model and the machine of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from moesaic.commands.panels import LEFT, TALL, TOP, WIDE, Line, Panel, Point, heat, lines, page
from moesaic.commands.plan_report import Report
from moesaic.core.errors import ConfigError
from moesaic.cost import ops
from moesaic.cost.hardware import GIB, Hardware, Level
from moesaic.cost.roofline import Roofs
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.planner import SearchLimits
from moesaic.policy.offloading.pricing import Price

CACHES = {"bf16": "bfloat16", "int8": "int8", "int4": "int4"}
"""Type of cached numbers: label in the picture -> name in ModelSizes."""
FACTORS = (0.5, 1, 2, 4, 8)
"""Factors of the link's and of the slow level's speed in the map of policies."""
MAP_CAPTION = "The best plan for machines with another link and another slow level. White: 0 %, or no plan."
MEMORIES = (0.4, 0.55, 0.75, 1.0, 1.4, 2.0)
"""Factors of the slow level's memory in the chart of throughput by memory."""


def draw(report: Report) -> str:
    """The charts as an SVG. Throughput by memory and the map search for a new policy at each point."""
    work = report.workload
    title = f"{report.model.name} on {report.hardware.name}: "
    title += f"{work.prompt:,} prompt tokens, {work.generate:,} generated"
    return page(title, [_attention(report), _experts(report), _by_memory(report), *_map(report)])


# ---- rooflines: both axes are logarithmic; x is flops per fetched byte, y is Gflops/s

X_LABEL, Y_LABEL = "flops for each byte", "Gflops/s"


def _log(intensity: float, flops: float) -> Point:
    return math.log10(intensity), max(math.log10(max(flops, 1.0) / 1e9), 0.0)


def _roofs(roofs: Roofs, hardware: Hardware, low: float, high: float) -> list[Line]:
    """The rooflines of both levels and of the link, from `low` to `high` flops per byte."""
    span = [low * (high / low) ** (step / 60) for step in range(61)]
    fast, slow = _short(hardware.fast), _short(hardware.slow)
    series = [Line(fast, [_log(x, roofs.at_i(x)) for x in span])]
    if roofs.peak_j:
        series.append(Line(slow, [_log(x, roofs.at_j(x)) for x in span]))
    return [*series, Line("link", [_log(x, roofs.link * x) for x in span if roofs.link * x <= roofs.peak_i])]


def _short(level: Level) -> str:
    """The first word of the level's name, since the legend has little room."""
    return level.name.replace(",", " ").split()[0]


def _attention(report: Report) -> Panel:
    """The roofline of attention in decode, with all of the cache on the slow level.

    The type of the cached numbers determines the intensity.
    """
    roofs = Roofs.from_hardware(report.hardware)
    work = {
        name: ops.attention(report.model, 1, report.workload.context, report.model.cache_number(dtype))
        for name, dtype in CACHES.items()
    }
    intensities = {name: attention_work.flops / attention_work.cache for name, attention_work in work.items()}
    series = _roofs(roofs, report.hardware, 0.1, 10 * max(*intensities.values(), roofs.p1, 100))
    series += [
        Line(name, [_log(x, 1e9), _log(x, max(roofs.at_j(x), roofs.link * x))])
        for name, x in intensities.items()
    ]
    caption = "Upright lines: attention by the type of its cache. Left of P1 the slow level "
    caption += "computes it faster than the link brings it."
    title = "Attention in decode, its cache on the slow level"
    panel = lines(title, X_LABEL, Y_LABEL, series, caption, logarithmic=True)
    marks = [("P1", roofs.p1, roofs.link * roofs.p1)] if roofs.p1 else []
    return _add_marks(panel, series, marks)


def _experts(report: Report) -> Panel:
    """The roofline of routed experts in decode.

    Their weights are fetched from the slow level once per batch, and read once per micro-batch.
    """
    roofs, model, policy = Roofs.from_hardware(report.hardware), report.model, report.price.policy
    fast = ops.routed_experts(model, policy.micro_batch).intensity
    batch_work = ops.routed_experts(model, policy.batch)
    batch = batch_work.flops / batch_work.weights
    p2, balance = roofs.p2(fast), roofs.balance(fast)
    series = _roofs(roofs, report.hardware, 0.1, 10 * max(p2, balance, batch, roofs.p1, 100))
    span = (0.1, 10 * max(p2, balance, batch))
    series.append(Line(f"mu {policy.micro_batch}", [_log(x, roofs.at_i(fast)) for x in span]))
    series.append(Line(f"N {policy.batch}", [_log(batch, 1e9), _log(batch, roofs.fetch_flops(fast, batch))]))
    marks = [("P2", p2, roofs.at_i(fast))]
    if balance <= p2 * 1.001:
        marks = [("P2 = balance", p2, roofs.at_i(fast))]
    elif roofs.link * balance <= roofs.peak_i * 1.001:
        marks.append(("balance", balance, roofs.link * balance))
    if roofs.p1:
        marks.append(("P1", roofs.p1, roofs.link * roofs.p1))
    caption = "N: rows of a batch, for which experts are fetched once. mu: rows of a micro-batch. "
    caption += "Right of P2 the fast level limits, not the link."
    title = "Routed experts in decode, fetched for a batch N"
    return _add_marks(lines(title, X_LABEL, Y_LABEL, series, caption, logarithmic=True), series, marks)


def _add_marks(panel: Panel, series: Sequence[Line], marks: Sequence[tuple[str, float, float]]) -> Panel:
    """Label dots of a panel at (label, flops per byte, flops/s). series: the lines that set its scale."""
    points = [point for line in series for point in line.points]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = 1.05 * max(y for _, y in points)
    parts = list(panel.parts)
    for label, intensity, flops in marks:
        x, y = _log(intensity, flops)
        x_pixel, y_pixel = LEFT + (x - low) / (high - low) * WIDE, TOP + (1 - y / top) * TALL
        parts.append(f'<circle class="c5" cx="{x_pixel:.1f}" cy="{y_pixel:.1f}" r="3.5"/>')
        left = x_pixel > LEFT + 0.7 * WIDE
        wide, text = 7 * len(f"{label}: {intensity:,.0f}"), f"{label}: {intensity:,.0f}"
        begin = x_pixel - 8 - wide if left else x_pixel + 8
        parts.append(
            f'<rect class="behind" x="{begin:.1f}" y="{y_pixel + 5:.1f}" width="{wide}" height="16"/>'
        )
        parts.append(f'<text x="{begin + 3:.1f}" y="{y_pixel + 17:.1f}">{text}</text>')
    return Panel(panel.title, parts, panel.caption)


# ---- Figure 1


def _by_memory(report: Report) -> Panel:
    """Throughput of the planned policy and of FlexGen's, by the size of the slow level's memory."""
    machine_memory = report.hardware.slow.memory
    memories = [factor * machine_memory for factor in MEMORIES]
    searches: dict[str, Callable[[Hardware], Price]] = {
        "planned": lambda machine: planner.search(report.model, machine, report.workload),
        "FlexGen's policy": lambda machine: planner.by_flexgen(report.model, machine, report.workload)[0],
    }
    series = []
    for name, search in searches.items():
        points = ((memory / GIB, _throughput(search, report.hardware, memory)) for memory in memories)
        series.append(Line(name, [(x, y) for x, y in points if y is not None]))
    slow = report.hardware.slow.name
    caption = (
        f"The best plan for each amount of this memory; the machine has {machine_memory / GIB:,.0f} GiB."
    )
    return lines("Throughput by the slow level's memory", f"GiB ({slow})", "tokens/s", series, caption)


def _throughput(search: Callable[[Hardware], Price], hardware: Hardware, memory: float) -> float | None:
    try:
        return search(hardware.with_slow(memory)).throughput
    except ConfigError:
        return None


# ---- Figure 10


def _map(report: Report) -> list[Panel]:
    """Heat maps of what is on the slow level: link speed down, slow level's speed across.

    Both vary from 1/2 to 8 times. The fastest link is at the top.
    """
    prices = [
        [_best(report, _scale_hardware(report.hardware, link, slow)) for slow in FACTORS]
        for link in reversed(FACTORS)
    ]
    experts = report.model.experts
    shares: dict[str, Callable[[Price], float]] = {
        "Weights on the slow level": lambda price: 1 - price.policy.static_experts / experts,
        "Cache on the slow level": lambda price: price.policy.slow_cache,
        "Attention computed there": lambda price: float(price.policy.slow_attention),
    }
    panels = []
    for title, share in shares.items():
        rows = [[0.0 if price is None else share(price) for price in row] for row in prices]
        x_label, y_label = "speed of the slow level, times this machine's", "speed of the link, times"
        names = [f"{factor:g}" for factor in FACTORS]
        panels.append(heat(title, x_label, y_label, rows, MAP_CAPTION, (names[::-1], names), "{:.0%}"))
    return panels


def _scale_hardware(hardware: Hardware, link: float, slow: float) -> Hardware:
    """`hardware` with factors for the slow level (memory, bandwidth, processor) and for the link."""
    level, old_link = hardware.slow, hardware.link
    quick = level.processor and replace(level.processor, flops=slow * level.processor.flops)
    new_level = replace(level, memory=slow * level.memory, bandwidth=slow * level.bandwidth, processor=quick)
    staging = None if old_link.staging is None else link * old_link.staging
    wider = replace(
        old_link,
        down_bandwidth=link * old_link.down_bandwidth,
        up_bandwidth=link * old_link.up_bandwidth,
        staging=staging,
    )
    return replace(hardware, slow=new_level, link=wider)


def _best(report: Report, hardware: Hardware) -> Price | None:
    try:
        return planner.search(report.model, hardware, report.workload, SearchLimits(("cgopipe", "in-place")))
    except ConfigError:
        return None
