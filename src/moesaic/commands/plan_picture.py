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
MAPPED = "The best plan for machines with another link and another slow level. White: 0 %, or no plan."
MEMORIES = (0.4, 0.55, 0.75, 1.0, 1.4, 2.0)
"""Factors of the slow level's memory in the chart of throughput by memory."""


def draw(report: Report) -> str:
    """The charts as an SVG. Throughput by memory and the map search for a new policy at each point."""
    work = report.workload
    title = f"{report.model.name} on {report.hardware.name}: "
    title += f"{work.prompt:,} prompt tokens, {work.generate:,} generated"
    return page(title, [_attention(report), _experts(report), _by_memory(report), *_map(report)])


# ---- rooflines: both axes are logarithmic; x is flops per fetched byte, y is Gflops/s

ACROSS, UP = "flops for each byte", "Gflops/s"


def _log(intensity: float, flops: float) -> Point:
    return math.log10(intensity), max(math.log10(max(flops, 1.0) / 1e9), 0.0)


def _roofs(roofs: Roofs, hardware: Hardware, low: float, high: float) -> list[Line]:
    """The rooflines of both levels and of the link, from `low` to `high` flops per byte."""
    span = [low * (high / low) ** (step / 60) for step in range(61)]
    fast, slow = _short(hardware.fast), _short(hardware.slow)
    drawn = [Line(fast, [_log(x, roofs.at_i(x)) for x in span])]
    if roofs.peak_j:
        drawn.append(Line(slow, [_log(x, roofs.at_j(x)) for x in span]))
    return [*drawn, Line("link", [_log(x, roofs.link * x) for x in span if roofs.link * x <= roofs.peak_i])]


def _short(level: Level) -> str:
    """The first word of the level's name, since the legend has little room."""
    return level.name.replace(",", " ").split()[0]


def _attention(report: Report) -> Panel:
    """The roofline of attention in decode, with all of the cache on the slow level.

    The type of the cached numbers determines the intensity.
    """
    roofs = Roofs.of(report.hardware)
    work = {
        name: ops.attention(report.model, 1, report.workload.context, report.model.cache_number(dtype))
        for name, dtype in CACHES.items()
    }
    at = {name: one.flops / one.cache for name, one in work.items()}
    drawn = _roofs(roofs, report.hardware, 0.1, 10 * max(*at.values(), roofs.p1, 100))
    drawn += [
        Line(name, [_log(x, 1e9), _log(x, max(roofs.at_j(x), roofs.link * x))]) for name, x in at.items()
    ]
    caption = "Upright lines: attention by the type of its cache. Left of P1 the slow level "
    caption += "computes it faster than the link brings it."
    title = "Attention in decode, its cache on the slow level"
    panel = lines(title, ACROSS, UP, drawn, caption, logarithmic=True)
    marks = [("P1", roofs.p1, roofs.link * roofs.p1)] if roofs.p1 else []
    return _marked(panel, drawn, marks)


def _experts(report: Report) -> Panel:
    """The roofline of routed experts in decode.

    Their weights are fetched from the slow level once per batch, and read once per micro-batch.
    """
    roofs, model, policy = Roofs.of(report.hardware), report.model, report.price.policy
    fast = ops.routed(model, policy.micro_batch).intensity
    fetched = ops.routed(model, policy.batch)
    batch = fetched.flops / fetched.weights
    p2, balance = roofs.p2(fast), roofs.balance(fast)
    drawn = _roofs(roofs, report.hardware, 0.1, 10 * max(p2, balance, batch, roofs.p1, 100))
    span = (0.1, 10 * max(p2, balance, batch))
    drawn.append(Line(f"mu {policy.micro_batch}", [_log(x, roofs.at_i(fast)) for x in span]))
    drawn.append(Line(f"N {policy.batch}", [_log(batch, 1e9), _log(batch, roofs.fetched(fast, batch))]))
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
    return _marked(lines(title, ACROSS, UP, drawn, caption, logarithmic=True), drawn, marks)


def _marked(panel: Panel, drawn: Sequence[Line], marks: Sequence[tuple[str, float, float]]) -> Panel:
    """`panel` with labelled dots at (label, flops per byte, flops/s). drawn: the lines that set its scale."""
    points = [point for line in drawn for point in line.points]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = 1.05 * max(y for _, y in points)
    parts = list(panel.parts)
    for label, intensity, flops in marks:
        x, y = _log(intensity, flops)
        across, down = LEFT + (x - low) / (high - low) * WIDE, TOP + (1 - y / top) * TALL
        parts.append(f'<circle class="c5" cx="{across:.1f}" cy="{down:.1f}" r="3.5"/>')
        left = across > LEFT + 0.7 * WIDE
        wide, text = 7 * len(f"{label}: {intensity:,.0f}"), f"{label}: {intensity:,.0f}"
        begin = across - 8 - wide if left else across + 8
        parts.append(f'<rect class="behind" x="{begin:.1f}" y="{down + 5:.1f}" width="{wide}" height="16"/>')
        parts.append(f'<text x="{begin + 3:.1f}" y="{down + 17:.1f}">{text}</text>')
    return Panel(panel.title, parts, panel.caption)


# ---- Figure 1


def _by_memory(report: Report) -> Panel:
    """Throughput of the planned policy and of FlexGen's, by the size of the slow level's memory."""
    held = report.hardware.slow.memory
    memories = [factor * held for factor in MEMORIES]
    searches: dict[str, Callable[[Hardware], Price]] = {
        "planned": lambda machine: planner.search(report.model, machine, report.workload),
        "FlexGen's policy": lambda machine: planner.by_flexgen(report.model, machine, report.workload)[0],
    }
    drawn = []
    for name, search in searches.items():
        found = ((memory / GIB, _throughput(search, report.hardware, memory)) for memory in memories)
        drawn.append(Line(name, [(x, y) for x, y in found if y is not None]))
    slow = report.hardware.slow.name
    caption = f"The best plan for each amount of this memory; the machine has {held / GIB:,.0f} GiB."
    return lines("Throughput by the slow level's memory", f"GiB ({slow})", "tokens/s", drawn, caption)


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
    found = [
        [_best(report, _scaled(report.hardware, link, slow)) for slow in FACTORS]
        for link in reversed(FACTORS)
    ]
    experts = report.model.experts
    shown: dict[str, Callable[[Price], float]] = {
        "Weights on the slow level": lambda one: 1 - one.policy.static_experts / experts,
        "Cache on the slow level": lambda one: one.policy.slow_cache,
        "Attention computed there": lambda one: float(one.policy.slow_attention),
    }
    panels = []
    for title, share in shown.items():
        rows = [[0.0 if one is None else share(one) for one in row] for row in found]
        across, up = "speed of the slow level, times this machine's", "speed of the link, times"
        names = [f"{factor:g}" for factor in FACTORS]
        panels.append(heat(title, across, up, rows, MAPPED, (names[::-1], names), "{:.0%}"))
    return panels


def _scaled(hardware: Hardware, link: float, slow: float) -> Hardware:
    """`hardware` with factors for the slow level (memory, bandwidth, processor) and for the link."""
    level, joined = hardware.slow, hardware.link
    quick = level.processor and replace(level.processor, flops=slow * level.processor.flops)
    there = replace(level, memory=slow * level.memory, bandwidth=slow * level.bandwidth, processor=quick)
    staging = None if joined.staging is None else link * joined.staging
    wider = replace(joined, down=link * joined.down, up=link * joined.up, staging=staging)
    return replace(hardware, slow=there, link=wider)


def _best(report: Report, hardware: Hardware) -> Price | None:
    try:
        return planner.search(report.model, hardware, report.workload, SearchLimits(("cgopipe", "in-place")))
    except ConfigError:
        return None
