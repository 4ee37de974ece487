"""Depths over time and place as an SVG that reads on light and on dark pages. Pure.

Panels stand below each other on one time axis and share their colours. Beside each are the means of its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from disaggregated.picture import DARK, LEFT, LIGHT, TOP, WIDTH, step

PANEL, ROW, GAP, FOOT = 132, 3, 30, 44
"""Heights in pixels: about a panel, at least a row, the space above a panel for its name, and the
time axis.
"""
BARS, SPACE = 76, 12
"""Widths in pixels: the bars of the means, and the space between them and the panel."""
WIDE = WIDTH - LEFT - SPACE - BARS - 40
LEVELS = 7
"""Maximum number of colours."""


@dataclass(frozen=True)
class Panel:
    name: str
    depths: list[list[float]]
    """[moment][place]; the first place is drawn at the bottom."""

    def means(self) -> list[float]:
        """The mean depth of each place."""
        return [sum(column) / len(self.depths) for column in zip(*self.depths, strict=True)]


def thresholds(top: float) -> list[float]:
    """Where each colour begins, ascending: 1, 2 or 5 times a power of ten, the LEVELS below `top`.

    Example: 30 -> 0.2, 0.5, 1, 2, 5, 10, 20.
    """
    power = math.floor(math.log10(max(top, 1e-9)))
    steps = [factor * 10.0**p for p in range(power - 3, power + 1) for factor in (1, 2, 5)]
    return [round(size, 9) for size in steps if size < top][-LEVELS:]


def draw(
    panels: Sequence[Panel], segments: Sequence[str], seconds: float, title: str, across: str, unit: str
) -> str:
    """places: their names, from the bottom. seconds: of all moments. unit: of the depths."""
    bounds = thresholds(max(depth for panel in panels for row in panel.depths for depth in row))
    widest = max(mean for panel in panels for mean in panel.means())
    tall = max(ROW, round(PANEL / len(segments)))  # whole pixels, or seams would show between rows
    height = TOP + len(panels) * (tall * len(segments) + GAP) + FOOT - GAP
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>']
    parts += _legend(bounds, unit)
    for number, panel in enumerate(panels):
        top = TOP + GAP // 2 + number * (tall * len(segments) + GAP)
        parts += [*_panel(panel, top, tall, bounds, segments), *_bars(panel.means(), top, tall, widest)]
    parts += _time(seconds, height - FOOT + GAP / 2, across)
    box = f"0 0 {WIDTH} {height + GAP / 2:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", _style(len(bounds)), *parts, "</svg>\n"])


def _panel(panel: Panel, top: int, tall: int, bounds: list[float], segments: Sequence[str]) -> Iterator[str]:
    """One path for each colour. Neighbours in time with one colour are one rectangle."""
    wide, bottom = WIDE / len(panel.depths), top + tall * len(segments)
    paths: dict[int, list[str]] = {}
    for segment in range(len(segments)):
        y = bottom - (segment + 1) * tall
        levels = [bisect_right(bounds, moment[segment]) for moment in panel.depths]
        begin = 0
        for end in range(1, len(levels) + 1):
            if end == len(levels) or levels[end] != levels[begin]:
                shape = f"M{LEFT + begin * wide:.1f},{y}h{(end - begin) * wide:.1f}v{tall}"
                paths.setdefault(levels[begin], []).append(f"{shape}h{(begin - end) * wide:.1f}z")
                begin = end
    yield f'<text x="{LEFT}" y="{top - 7}">{escape(panel.name)}</text>'
    yield f'<text class="y" x="{LEFT - 6}" y="{top - 7}">layer</text>'
    for level, shapes in sorted(paths.items()):
        if level:
            yield f'<path class="depth l{level}" d="{"".join(shapes)}"/>'
    yield f'<path class="frame" d="M{LEFT},{top}h{WIDE}V{bottom}h-{WIDE}z"/>'
    named = max(1, math.ceil(14 / tall))  # so that names do not touch
    for segment, name in enumerate(segments):
        if segment == len(segments) - 1 or (segment % named == 0 and segment + named < len(segments)):
            middle = bottom - (segment + 0.5) * tall
            yield f'<text class="y" x="{LEFT - 6}" y="{middle + 4:.1f}">{escape(name)}</text>'


def _bars(means: list[float], top: int, tall: int, widest: float) -> Iterator[str]:
    """As long as their shares of the widest, with numbers where there is room; above, all together."""
    left = LEFT + WIDE + SPACE
    shapes = []
    yield f'<text x="{left}" y="{top - 7}">mean: {sum(means):.1f} in all</text>'
    for segment, mean in enumerate(means):
        y = top + (len(means) - segment - 0.9) * tall
        long = BARS * mean / max(widest, 1e-9)
        shapes.append(f"M{left},{y:.1f}h{long:.1f}v{0.8 * tall:.1f}H{left}z")
        if tall >= 14:
            yield f'<text x="{left + long + 4:.1f}" y="{y + 0.4 * tall + 4:.1f}">{mean:.1f}</text>'
    yield f'<path class="bar" d="{"".join(shapes)}"/>'


def _legend(bounds: list[float], unit: str) -> Iterator[str]:
    """A box for each colour, with the depth at which it begins."""
    for number, bound in enumerate(bounds):
        x = LEFT + 52 * number
        yield f'<path class="l{number + 1} edge" d="M{x},31h14v14h-14z"/>'
        yield f'<text x="{x + 18}" y="42">{bound:g}</text>'
    yield f'<text x="{LEFT + 52 * len(bounds)}" y="42">or more {escape(unit)}</text>'


def _time(seconds: float, y: float, across: str) -> Iterator[str]:
    size = step(seconds, 8)
    for number in range(math.floor(seconds / size) + 1):
        x = LEFT + number * size / seconds * WIDE
        yield f'<text class="x" x="{x:.1f}" y="{y + 16:.1f}">{number * size:g}</text>'
    yield f'<text class="x" x="{LEFT + WIDE / 2}" y="{y + 34:.1f}">{escape(across)}</text>'


def _style(levels: int) -> str:
    """Styles for one colour that is more opaque for larger depths."""
    steps = (0.06 + 0.94 * (number / levels) ** 1.5 for number in range(1, levels + 1))
    depth = " ".join(f".l{number} {{ fill-opacity: {share:.2f} }}" for number, share in enumerate(steps, 1))
    return f"""<style>
text {{ font: 12px sans-serif; fill: #1f2328 }} .title {{ font-size: 14px }}
.x {{ text-anchor: middle }} .y {{ text-anchor: end }}
path {{ fill: {LIGHT[0]} }} .depth {{ shape-rendering: crispEdges }}
.frame {{ fill: none; stroke: #8888; stroke-width: 0.5 }}
.edge {{ stroke: #8888; stroke-width: 0.5 }} .bar {{ fill-opacity: 0.5 }} {depth}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} path {{ fill: {DARK[0]} }} }}
</style>"""
