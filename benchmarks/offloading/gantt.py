"""A Gantt chart of passes as an SVG: a row for each lane, tasks in the colour of their kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moesaic.policy.offloading.tasks import Kind, Lane
from offloading.sessions import Pass

WIDTH, LEFT, RIGHT, TOP = 1000, 118, 14, 64
ROW, GAP = 15, 26
"""Height of a lane, and of the space between two charts."""
GROUPS: dict[str, tuple[str, tuple[Kind, ...]]] = {
    "pre-attention": ("#8250df", (Kind.PRE,)),
    "attention": ("#1a7f37", (Kind.ATTENTION,)),
    "post-attention": (
        "#0969da",
        (Kind.POST_WITH_EXPERTS, Kind.POST_WITHOUT_EXPERTS, Kind.SPLIT, Kind.PROMPT, Kind.HEAD),
    ),
    "experts alone": ("#54aeff", (Kind.EXPERTS,)),
    "weights": ("#bc4c00", (Kind.LOAD_PAGE, Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY, Kind.STAGE_PAGE)),
    "cache": ("#d4a72c", (Kind.LOAD_CACHE, Kind.SAVE_CACHE)),
    "rows": ("#cf222e", (Kind.SAVE_QKV, Kind.LOAD_ROWS, Kind.SAVE_ROWS, Kind.LOAD_ANSWERS)),
}
"""Groups of task kinds that have one colour."""
COLOURS = {kind.value: colour for colour, kinds in GROUPS.values() for kind in kinds}
Box = Sequence[Any]
"""Kind, lane, layer, micro-batch or page, begin and end in seconds."""


def told(one: Pass) -> list[list[Any]]:
    """A pass as a JSON object."""
    return [
        [task.kind.value, task.lane.value, task.layer, task.micro_batch, start, end]
        for task, start, end in zip(one.tasks, one.times.starts, one.times.ends, strict=True)
        if task.kind is not Kind.SYNC
    ]


def draw(charts: Mapping[str, Sequence[Box]], title: str, layers: int = 2) -> str:
    """Each chart from when the experts of layer 1 begin until those of `layers` layers later do.

    All have one scale, so a shorter chart is a faster schedule.
    """
    cut = {name: window(boxes, layers) for name, boxes in charts.items()}
    span = max(end - begin for begin, end in cut.values())
    parts, y = [f'<text class="title" x="8" y="20">{escape(title)}</text>', *_legend()], TOP
    for name, boxes in charts.items():
        drawn, y = _chart(name, boxes, cut[name], span, y)
        parts += drawn
    parts += _axis(span, y)
    height = y + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>\n"])


def window(boxes: Sequence[Box], layers: int) -> tuple[float, float]:
    """From layer 1's first post-attention (layer 0's where there is no other) to that of `layers` later.

    Where there are fewer layers, to the end; loads of weights do not count, they are a layer ahead.
    """
    own = [box for box in boxes if COLOURS[box[0]] != COLOURS[Kind.LOAD_PAGE.value]]
    last = max(box[2] for box in own if box[0] != Kind.HEAD.value)
    first = min(1, last)
    after = [box for box in own if box[0] in (Kind.POST_WITH_EXPERTS.value, Kind.POST_WITHOUT_EXPERTS.value)]
    begin, end = (
        min((box[4] for box in after if box[2] == layer), default=None) for layer in (first, first + layers)
    )
    whole = max(box[5] for box in own if box[2] <= last)
    return begin or 0.0, whole if end is None else end


def _chart(
    name: str, boxes: Sequence[Box], cut: tuple[float, float], span: float, y: int
) -> tuple[list[str], int]:
    """A chart whose top is at y, and where the next one begins."""
    used = {box[1] for box in boxes}
    lanes = [lane.value for lane in Lane if lane.value in used]
    parts = [f'<text class="name" x="8" y="{y - 5}">{escape(name)}</text>']
    for place, lane in enumerate(lanes):
        at = y + place * ROW
        parts.append(f'<text class="lane" x="{LEFT - 6}" y="{at + 11}">{lane}</text>')
        parts.append(f'<path class="grid" d="M{LEFT},{at + ROW} L{WIDTH - RIGHT},{at + ROW}"/>')
    seen = (box for box in boxes if box[5] > cut[0] and box[4] < cut[1])
    parts += [_box(box, cut, span, y + lanes.index(box[1]) * ROW) for box in seen]
    return parts, y + len(lanes) * ROW + GAP


def _box(box: Box, cut: tuple[float, float], span: float, y: int) -> str:
    """Layers are told apart by how dark they are, and weights have the layer that they are for."""
    kind, _, layer, part, begin, end = box
    scale = (WIDTH - LEFT - RIGHT) / span
    x, stop = ((min(max(when, cut[0]), cut[1]) - cut[0]) * scale for when in (begin, end))
    wide = max(stop - x, 0.6)
    number = f"{layer}.{part}"
    said = f"{kind}, layer {layer}, {part}: {1e3 * (end - begin):.2f} ms"
    opacity = 0.95 if layer % 2 else 0.6
    drawn = (
        f'<rect x="{LEFT + x:.1f}" y="{y + 1}" width="{wide:.1f}" height="{ROW - 2}" fill="{COLOURS[kind]}" '
        f'fill-opacity="{opacity}"><title>{escape(said)}</title></rect>'
    )
    if wide > 6 * len(number):
        drawn += f'<text class="in" x="{LEFT + x + wide / 2:.1f}" y="{y + 11}">{number}</text>'
    return drawn


def _legend() -> list[str]:
    parts, x = [], 8
    for name, (colour, _) in GROUPS.items():
        parts.append(f'<rect x="{x}" y="30" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="39">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    parts.append(f'<text x="{x}" y="39">numbers: layer.micro-batch, or page</text>')
    return parts


def _axis(span: float, y: int) -> list[str]:
    """The axis in milliseconds, with about ten marks."""
    size = next(
        size
        for power in range(-3, 7)
        for size in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if 1e3 * span / size <= 12
    )
    parts = []
    for mark in range(int(1e3 * span / size) + 1):
        x = LEFT + mark * size / (1e3 * span) * (WIDTH - LEFT - RIGHT)
        parts.append(f'<path class="grid" d="M{x:.1f},{TOP - 6} L{x:.1f},{y - GAP + 6}"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{y - GAP + 20}">{mark * size:g}</text>')
    parts.append(f'<text class="end" x="{WIDTH - RIGHT}" y="{y - GAP + 34}">milliseconds</text>')
    return parts


STYLE = """<style>
text { font: 11px sans-serif; fill: #1f2328 } .title { font-size: 14px } .name { font-weight: bold }
.lane { text-anchor: end; fill: #656d76 } .end { text-anchor: end } .x { text-anchor: middle }
.in { text-anchor: middle; font-size: 9px; fill: #ffffff }
.grid { stroke: #8888; stroke-width: 0.5; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .lane { fill: #8b949e } }
</style>"""
