"""Draws small charts on one page, as an SVG for light and dark backgrounds. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 270
"""Size of one panel in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 60, 40
WIDE, TALL = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
LIGHT = ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989", "#57606a")
DARK = ("#58a6ff", "#3fb950", "#f0883e", "#bc8cff", "#f778ba", "#8b949e")
"""Colours of lines and of groups of dots, on light and dark backgrounds. They repeat after the last one."""
SHADES = 8
"""Number of shades of a heat map, in addition to no colour at all."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    title: str
    parts: Sequence[str]


def lines(title: str, across: str, up: str, drawn: Sequence[Line]) -> Panel:
    """A panel with lines on a y axis from 0. Lines without points are left out. across, up: axis names."""
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return Panel(title, [f'<text x="{LEFT}" y="{TOP + 20}">not in this profile</text>'])
    xs = [x for line in drawn for x, _ in line.points]
    top = 1.05 * max(max(y for line in drawn for _, y in line.points), 1e-9)
    at = _scale(min(xs), max(xs), 0, top)
    parts = _axes(min(xs), max(xs), top, at, across, up)
    for number, line in enumerate(drawn):
        path = " L".join(at(x, y) for x, y in line.points)
        parts.append(f'<path class="line c{number % len(LIGHT)}" d="M{path}"/>')
        if len(line.points) == 1:
            parts.append(_dot(at(*line.points[0]), number))
    return Panel(title, [*parts, *_legend([line.name for line in drawn])])


def dots(title: str, groups: Sequence[Line]) -> Panel:
    """A panel with groups of points in a plane without axes. Groups without points are left out."""
    groups = [group for group in groups if group.points]
    points = [point for group in groups for point in group.points]
    if not points:
        return Panel(title, [f'<text x="{LEFT}" y="{TOP + 20}">not in this profile</text>'])
    xs, ys = zip(*points, strict=True)
    at = _scale(min(xs), max(xs), min(ys), max(ys))
    parts = [_dot(at(*point), number) for number, group in enumerate(groups) for point in group.points]
    return Panel(title, [*parts, *_legend([group.name for group in groups])])


def heat(title: str, across: str, up: str, rows: Sequence[Sequence[float]]) -> Panel:
    """A panel with a square heat map of values >= 0. The largest value is darkest; row 0 is at the top."""
    most = max((value for row in rows for value in row), default=0) or 1.0
    size = TALL / max(len(rows), 1)
    left = LEFT + (WIDE - TALL) / 2
    parts = [f'<g transform="translate({left:.1f},{TOP}) scale({size:.4f})">', *cells(rows, most), "</g>"]
    parts.append(f'<path class="grid" d="M{left:.1f},{TOP} h{TALL} v{TALL} h-{TALL} z"/>')
    parts.append(f'<text class="x" x="{LEFT + WIDE / 2}" y="{HEIGHT - 20}">{escape(across)}</text>')
    parts.append(f'<text x="8" y="{TOP - 8}">{escape(up)}</text>')
    return Panel(title, parts)


def cells(rows: Sequence[Sequence[float]], most: float, kind: str = "cell") -> list[str]:
    """SVG paths of squares of size 1 for the values of `rows`, which are 0 to `most`.

    Each shade above 0 is one path. kind: "cell", or "far" for another colour.
    """
    found: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            found[math.ceil(value / most * SHADES - 0.5)].append(f"M{j},{i}h1v1h-1z")
    return [
        f'<path class="{kind}" fill-opacity="{shade / SHADES:g}" d="{"".join(squares)}"/>'
        for shade, squares in enumerate(found)
        if shade and squares
    ]


def page(title: str, panels: Sequence[Panel], columns: int = 2, height: int = HEIGHT) -> str:
    """The SVG file, with `columns` panels in each row. height: height of a panel in pixels."""
    wide, tall = columns * WIDTH, 36 + -(-len(panels) // columns) * height
    parts = [f'<text class="head" x="8" y="24">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * WIDTH},{36 + row * height})">')
        parts.append(f'<text class="title" x="8" y="18">{escape(panel.title)}</text>')
        parts += [*panel.parts, "</g>"]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _style(), *parts, "</svg>\n"])


def step(span: float, count: int) -> float:
    """The distance of about `count` marks on an axis of length `span`: 1, 2 or 5 times a power of ten.

    Example: 13 and 6 -> 2.
    """
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))


def _scale(low: float, high: float, bottom: float, top: float) -> Callable[[float, float], str]:
    def at(x: float, y: float) -> str:
        across = (x - low) / ((high - low) or 1)
        up = (y - bottom) / ((top - bottom) or 1)
        return f"{LEFT + across * WIDE:.1f},{TOP + (1 - up) * TALL:.1f}"

    return at


def _dot(place: str, number: int) -> str:
    x, y = place.split(",")
    return f'<circle class="c{number % len(LIGHT)}" cx="{x}" cy="{y}" r="2.5"/>'


def _axes(
    low: float, high: float, top: float, at: Callable[[float, float], str], across: str, up: str
) -> list[str]:
    parts = []
    size = max(step(high - low, 6), 1) if high > low else 1
    for number in range(math.ceil(low / size), math.floor(high / size) + 1):
        x, y = at(number * size, 0).split(",")
        parts.append(f'<text class="x" x="{x}" y="{float(y) + 16:.1f}">{number * size:g}</text>')
    size = step(top, 5)
    for number in range(math.floor(top / size) + 1):
        x, y = at(low, number * size).split(",")
        parts.append(f'<path class="grid" d="M{x},{y} h{WIDE}"/>')
        parts.append(
            f'<text class="y" x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}">{number * size:g}</text>'
        )
    parts.append(f'<text class="x" x="{LEFT + WIDE / 2}" y="{HEIGHT - 8}">{escape(across)}</text>')
    parts.append(f'<text x="8" y="{TOP - 8}">{escape(up)}</text>')
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], LEFT
    for number, name in enumerate(names):
        if number == len(LIGHT) or x > WIDTH - 60:
            parts.append(f'<text x="{x}" y="38">...</text>')
            break
        parts.append(f'<path class="line c{number}" d="M{x},34 h12"/>')
        parts.append(f'<text x="{x + 16}" y="38">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    return parts


def _style() -> str:
    def colours(names: Sequence[str]) -> str:
        strokes = [f".c{number} {{ stroke: {name} }}" for number, name in enumerate(names)]
        return " ".join([*strokes, f".cell {{ fill: {names[0]} }} .far {{ fill: {names[2]} }}"])

    return f"""<style>
text {{ font: 12px sans-serif; fill: #1f2328 }} .title {{ font-size: 14px }} .head {{ font-size: 16px }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
path, circle {{ fill: none }} .line, circle {{ stroke-width: 2 }} .grid {{ stroke: #8888; stroke-width: 0.5 }}
.border {{ stroke: #888 }}
{colours(LIGHT)}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} {colours(DARK)} }}
</style>"""
