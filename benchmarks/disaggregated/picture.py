"""Lines over time as an SVG that reads on light and on dark pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 56, 44
LIGHT, DARK = ("#0969da", "#1a7f37", "#bc4c00"), ("#58a6ff", "#3fb950", "#f0883e")
"""Colours of the first three lines, on light and on dark pages."""


@dataclass(frozen=True)
class Line:
    name: str
    points: list[tuple[float, float]]


def step(span: float, count: int) -> float:
    """Of about `count` marks on an axis: 1, 2 or 5 times a power of ten. Example: 13 and 6 -> 2."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))


def draw(lines: Sequence[Line], title: str, across: str, up: str, mark: float | None = None) -> str:
    """At most three lines with points. across, up: names of the axes. mark: a vertical line there."""
    xs = [x for line in lines for x, _ in line.points]
    low, high = min(xs), max(xs)
    top = 1.05 * max(max(y for line in lines for _, y in line.points), 1e-9)
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - low) / (high - low) * wide:.1f},{TOP + (1 - y / top) * tall:.1f}"

    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>']
    parts += _axes(low, high, top, at, across, up)
    if mark is not None:
        parts.append(f'<path class="mark" d="M{at(mark, 0)} L{at(mark, top)}"/>')
    for number, line in enumerate(lines):
        path = " L".join(at(x, y) for x, y in line.points)
        parts.append(f'<path class="line c{number}" d="M{path}"/>')
        x = LEFT + 190 * number
        parts.append(f'<path class="line c{number}" d="M{x},38 L{x + 24},38"/>')
        parts.append(f'<text x="{x + 30}" y="42">{escape(line.name)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _style(), *parts, "</svg>\n"])


def _axes(low: float, high: float, top: float, at: object, across: str, up: str) -> list[str]:
    assert callable(at)
    parts = []
    size = step(high - low, 8)
    for number in range(math.ceil(low / size), math.floor(high / size) + 1):
        x, y = at(number * size, 0).split(",")
        parts.append(f'<text class="x" x="{x}" y="{float(y) + 16:.1f}">{number * size:g}</text>')
    size = step(top, 5)
    for number in range(math.floor(top / size) + 1):
        x, y = at(low, number * size).split(",")
        parts.append(f'<path class="grid" d="M{x},{y} L{at(high, number * size)}"/>')
        parts.append(
            f'<text class="y" x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}">{number * size:g}</text>'
        )
    parts.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">{escape(across)}</text>')
    parts.append(f'<text x="8" y="{TOP - 4}">{escape(up)}</text>')
    return parts


def _style() -> str:
    def colours(names: Sequence[str]) -> str:
        return " ".join(f".c{number} {{ stroke: {name} }}" for number, name in enumerate(names))

    return f"""<style>
text {{ font: 12px sans-serif; fill: #1f2328 }} .title {{ font-size: 14px }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
path {{ fill: none }} .line {{ stroke-width: 2 }} .grid {{ stroke: #8888; stroke-width: 0.5 }}
.mark {{ stroke: #888; stroke-dasharray: 4 3 }} {colours(LIGHT)}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} {colours(DARK)} }}
</style>"""
