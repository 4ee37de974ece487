"""Draws small charts on one page, as an SVG for light and dark backgrounds. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH, HEIGHT = 440, 330
"""Size of one panel in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 100, 44
WIDE, TALL = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
LIGHT = ("#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989", "#57606a")
DARK = ("#58a6ff", "#3fb950", "#f0883e", "#bc8cff", "#f778ba", "#8b949e")
"""Colours of lines and of groups of dots, on light and dark backgrounds. They repeat after the last one."""
DASHES = ("", "9 3", "3 3", "9 3 2 3", "14 4", "2 5")
"""Dashes of lines with these colours: a line also shows where another one lies over it."""
SHADES = 8
"""Number of shades of a heat map, in addition to no colour at all."""
CAPTION = 70
"""Maximum characters of a line of a caption."""

Point = tuple[float, float]
Ticks = Mapping[float, str]
"""Place on an axis -> its label."""


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    title: str
    parts: Sequence[str]
    caption: str = ""
    """The sentences below the title, which say how to read the chart. At most two lines are drawn."""


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Line],
    caption: str = "",
    ticks: Ticks | None = None,
    logarithmic: bool = False,
) -> Panel:
    """A panel with lines on a y axis from 0. Lines without points are left out. x_label, y_label: axis names.

    ticks: labels of the x axis; None: round numbers. logarithmic: the numbers of both axes are powers of
    ten, and the labels are 10 to that power.
    """
    series = [line for line in series if line.points]
    if not series:
        return _empty_panel(title, caption)
    xs = [x for line in series for x, _ in line.points]
    top = 1.05 * (max(y for line in series for _, y in line.points) or 1.0)
    place_point = _scale(min(xs), max(xs), 0, top)
    parts = [
        *_x_axis(min(xs), max(xs), place_point, x_label, ticks, logarithmic),
        *_y_axis(min(xs), top, place_point, y_label, logarithmic),
    ]
    for number, line in enumerate(series):
        path = " L".join(place_point(x, y) for x, y in line.points)
        parts.append(f'<path class="line c{number % len(LIGHT)}" d="M{path}"/>')
        # A path through one point draws nothing.
        if len(line.points) == 1:
            parts.append(_dot(place_point(*line.points[0]), number))
    return Panel(title, [*parts, *_legend([line.name for line in series])], caption)


def bars(title: str, x_label: str, y_label: str, series: Sequence[Line], caption: str = "") -> Panel:
    """A panel with a group of bars for each number on the x axis: a bar for each line with a value there."""
    series = [line for line in series if line.points]
    if not series:
        return _empty_panel(title, caption)
    numbers = sorted({x for line in series for x, _ in line.points})
    top = 1.05 * (max(y for line in series for _, y in line.points) or 1.0)
    room = WIDE / len(numbers)
    place_point = _scale(0, WIDE, 0, top)
    tick_step = max(1, math.ceil(len(numbers) / 16))
    ticks = {(i + 0.5) * room: f"{x:g}" for i, x in enumerate(numbers) if i % tick_step == 0}
    parts = [
        *_x_axis(0, WIDE, place_point, x_label, ticks, False),
        *_y_axis(0, top, place_point, y_label, False),
    ]
    thick = 0.8 * room / len(series)
    for number, line in enumerate(series):
        for x, y in line.points:
            begin = numbers.index(x) * room + 0.1 * room + number * thick
            left, high = place_point(begin, y).split(",")
            # A bar keeps half a pixel, since a thinner one would not be seen.
            tall = TOP + TALL - float(high)
            place = f'x="{left}" y="{high}" width="{max(0.5, thick - 1):.1f}" height="{tall:.1f}"'
            parts.append(f'<rect class="bar b{number % len(LIGHT)}" {place}/>')
    return Panel(title, [*parts, *_legend([line.name for line in series], "bar b")], caption)


def dots(title: str, groups: Sequence[Line], caption: str = "") -> Panel:
    """A panel with groups of points in a plane without axes. Groups without points are left out."""
    groups = [group for group in groups if group.points]
    points = [point for group in groups for point in group.points]
    if not points:
        return _empty_panel(title, caption)
    xs, ys = zip(*points, strict=True)
    place_point = _scale(min(xs), max(xs), min(ys), max(ys))
    parts = [f'<path class="grid" d="M{LEFT - 6},{TOP - 6} h{WIDE + 12} v{TALL + 12} h-{WIDE + 12} z"/>']
    parts += [
        _dot(place_point(*point), number) for number, group in enumerate(groups) for point in group.points
    ]
    return Panel(title, [*parts, *_legend([group.name for group in groups], "dot c")], caption)


def heat(
    title: str,
    x_label: str,
    y_label: str,
    rows: Sequence[Sequence[float]],
    caption: str = "",
    ticks: tuple[Sequence[str], Sequence[str]] | None = None,
    form: str = "{:g}",
) -> Panel:
    """A panel with a square heat map of values >= 0. The largest value is darkest; row 0 is at the top.

    ticks: labels of the rows and of the columns; None: their numbers, as many as fit. form: of the numbers at
    the scale of colours.
    """
    largest = max((value for row in rows for value in row), default=0)
    count = max(len(rows), 1)
    size, left = TALL / count, LEFT + (WIDE - TALL) / 2
    parts = [
        f'<g transform="translate({left:.1f},{TOP}) scale({size:.4f})">',
        *cells(rows, largest or 1.0),
        "</g>",
    ]
    parts.append(f'<path class="grid" d="M{left:.1f},{TOP} h{TALL} v{TALL} h-{TALL} z"/>')
    labels, label_step = ticks or ([str(i) for i in range(count)],) * 2, max(1, math.ceil(count / 8))
    for i in range(0, count if rows else 0, label_step):
        middle = (i + 0.5) * size
        parts.append(
            f'<text class="y" x="{left - 6:.1f}" y="{TOP + middle + 4:.1f}">{escape(labels[0][i])}</text>'
        )
        place = f'x="{left + middle:.1f}" y="{TOP + TALL + 16}"'
        parts.append(f'<text class="x" {place}>{escape(labels[1][i])}</text>')
    parts += [
        *_axis_labels(x_label, y_label, left - 46),
        *_shades(left + TALL + 18, form.format(largest), form.format(0)),
    ]
    return Panel(title, parts, caption)


def _shades(x: float, largest: str, smallest: str) -> list[str]:
    """The scale of the colours of a heat map."""
    tall = TALL / (SHADES + 1)
    squares = [
        f'<rect class="cell" fill-opacity="{shade / SHADES:g}" x="{x:.1f}" '
        f'y="{TOP + (SHADES - shade) * tall:.1f}" width="10" height="{tall:.1f}"/>'
        for shade in range(SHADES + 1)
    ]
    frame = f'<path class="grid" d="M{x:.1f},{TOP} h10 v{TALL} h-10 z"/>'
    high = f'<text x="{x + 15:.1f}" y="{TOP + 10}">{escape(largest)}</text>'
    return [*squares, frame, high, f'<text x="{x + 15:.1f}" y="{TOP + TALL}">{escape(smallest)}</text>']


def _empty_panel(title: str, caption: str) -> Panel:
    return Panel(title, [f'<text x="{LEFT}" y="{TOP + 20}">not in this profile</text>'], caption)


def cells(rows: Sequence[Sequence[float]], largest: float, kind: str = "cell") -> list[str]:
    """SVG paths of squares of size 1 for the values of `rows`, which are 0 to `largest`.

    Each shade above 0 is one path. kind: "cell", or "far" for another colour.
    """
    paths: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            paths[math.ceil(value / largest * SHADES - 0.5)].append(f"M{j},{i}h1v1h-1z")
    return [
        f'<path class="{kind}" fill-opacity="{shade / SHADES:g}" d="{"".join(squares)}"/>'
        for shade, squares in enumerate(paths)
        if shade and squares
    ]


def page(title: str, panels: Sequence[Panel], columns: int = 2, height: int = HEIGHT) -> str:
    """The SVG file, with `columns` panels in each row. height: height of a panel in pixels."""
    wide, tall = columns * WIDTH, 40 + -(-len(panels) // columns) * height
    parts = [f'<text class="head" x="8" y="24">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * WIDTH},{40 + row * height})">')
        parts.append(f'<text class="title" x="8" y="18">{escape(panel.title)}</text>')
        for place, line in enumerate(wrap(panel.caption, CAPTION)[:2]):
            parts.append(f'<text class="caption" x="8" y="{36 + 14 * place}">{escape(line)}</text>')
        parts += [*panel.parts, "</g>"]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _style(), *parts, "</svg>\n"])


def step(span: float, count: int) -> float:
    """The distance of about `count` marks on an axis of length `span`: 1, 2 or 5 times a power of ten.

    Example: 13 and 6 -> 2.
    """
    # Labels at such numbers are short, whatever the span.
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))


def _scale(low: float, high: float, bottom: float, top: float) -> Callable[[float, float], str]:
    def place_point(x: float, y: float) -> str:
        x_share = (x - low) / ((high - low) or 1)
        y_share = (y - bottom) / ((top - bottom) or 1)
        return f"{LEFT + x_share * WIDE:.1f},{TOP + (1 - y_share) * TALL:.1f}"

    return place_point


def _dot(place: str, number: int) -> str:
    x, y = place.split(",")
    return f'<circle class="c{number % len(LIGHT)}" cx="{x}" cy="{y}" r="2.5"/>'


def _x_axis(
    low: float,
    high: float,
    place_point: Callable[[float, float], str],
    name: str,
    ticks: Ticks | None,
    logarithmic: bool,
) -> list[str]:
    """The labels and the name of the x axis."""
    if ticks is None:
        size = max(step(high - low, 6), 1) if high > low else 1
        numbers = [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]
        ticks = {number: _label(number, logarithmic) for number in numbers}
    parts = []
    for number, label in ticks.items():
        x, y = place_point(number, 0).split(",")
        parts.append(f'<text class="x" x="{x}" y="{float(y) + 16:.1f}">{escape(label)}</text>')
    return [*parts, *_axis_labels(name, "", 0)]


def _y_axis(
    low: float, top: float, place_point: Callable[[float, float], str], name: str, logarithmic: bool
) -> list[str]:
    """The grid, the labels and the name of the y axis."""
    parts = []
    size = max(1.0, step(top, 5)) if logarithmic else step(top, 5)
    for number in range(math.floor(top / size) + 1):
        x, y = place_point(low, number * size).split(",")
        parts.append(f'<path class="grid" d="M{x},{y} h{WIDE}"/>')
        label = _label(number * size, logarithmic)
        parts.append(f'<text class="y" x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}">{label}</text>')
    return [*parts, *_axis_labels("", name, 14)]


def _label(number: float, logarithmic: bool) -> str:
    """Example: 3 -> "3", or "1,000" as a power of ten."""
    value = 10.0**number if logarithmic else number
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _axis_labels(x_label: str, y_label: str, x: float) -> list[str]:
    """The names of the axes. x: place of that of the y axis."""
    parts = []
    if x_label:
        parts.append(f'<text class="x" x="{LEFT + WIDE / 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
    if y_label:
        place = f"translate({x:.1f},{TOP + TALL / 2}) rotate(-90)"
        parts.append(f'<text class="x" transform="{place}">{escape(y_label)}</text>')
    return parts


def _legend(names: Sequence[str], kind: str = "line c") -> list[str]:
    """Two rows of names at most. kind: the mark before each, `line c`, `bar b` or `dot c`."""
    parts: list[str] = []
    x, y = LEFT, 72
    for number, name in enumerate(names):
        wide = 34 + 7 * len(name)
        if x + wide > WIDTH and y == 72:
            x, y = LEFT, 88
        if number == len(LIGHT) or x + wide > WIDTH:
            parts.append(f'<text x="{x}" y="{y}">...</text>')
            break
        mark = {
            "line c": f'<path class="line c{number}" d="M{x},{y - 4} h18"/>',
            "bar b": f'<rect class="bar b{number}" x="{x}" y="{y - 10}" width="12" height="10"/>',
            "dot c": _dot(f"{x + 12},{y - 4}", number),
        }
        parts.append(mark[kind])
        parts.append(f'<text x="{x + 23}" y="{y}">{escape(name)}</text>')
        x += wide
    return parts


def _style() -> str:
    def colours(names: Sequence[str]) -> str:
        strokes = [f".c{i} {{ stroke: {name} }} .b{i} {{ fill: {name} }}" for i, name in enumerate(names)]
        return " ".join([*strokes, f".cell {{ fill: {names[0]} }} .far {{ fill: {names[2]} }}"])

    dashes = " ".join(f".line.c{i} {{ stroke-dasharray: {dash} }}" for i, dash in enumerate(DASHES) if dash)
    return f"""<style>
text {{ font: 12px sans-serif; fill: #1f2328 }} .title {{ font-size: 14px; font-weight: 600 }}
.head {{ font-size: 16px; font-weight: 600 }} .caption {{ fill: #59636e; font-size: 11.5px }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
path, circle {{ fill: none }} .line, circle {{ stroke-width: 2 }} .grid {{ stroke: #8888; stroke-width: 0.5 }}
.border {{ stroke: #888 }} .behind {{ fill: #fffc }}
{dashes}
{colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }} .caption {{ fill: #9198a1 }} .behind {{ fill: #0d1117cc }} {colours(DARK)}
}}
</style>"""
