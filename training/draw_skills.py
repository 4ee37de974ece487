"""Draws which experts each skill of the demo model uses, from the shares in evaluation.json.

    python training/draw_skills.py src/moesaic/demo/evaluation.json docs/skill-map.svg

There is a map for each layer: a row for each skill, a column for each expert. Experts are sorted by the skill
that chooses them most beside the other skills, so what a skill has of its own lies near the diagonal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import torch

from demo_routing import distances
from moesaic.commands.panels import SHADES, WIDTH, Panel, cells, page

TITLE = "Which experts each skill of the demo chooses, by layer"
COLUMNS = 3
LEFT, TOP, RIGHT, ROW = 82, 46, 20, 17
"""Places and sizes in a panel, in pixels. ROW: the height of one skill."""
LEFT_OUT = ("conversations",)
"""Measured beside the skills, of which they are made."""

Shares = Mapping[str, Sequence[Sequence[float]]]
"""Skill -> the share of each expert in its choices, by layer."""


def read_shares(file: Path) -> dict[str, list[list[float]]]:
    """Reads the shares of an evaluation. It stops where the file has no skills."""
    skills = json.loads(file.read_text(encoding="utf-8")).get("skills", {})
    if not skills:
        raise SystemExit(f"{file}: got no skills; allowed: what training/evaluate_demo.py wrote")
    return {name: row["experts"] for name, row in skills.items() if name not in LEFT_OUT}


def sort_experts(layer: Sequence[Sequence[float]]) -> list[int]:
    """The experts by the skill that favours them most, in the order of the skills.

    layer: [skills, experts] shares. Within a skill those come first that the others choose least.
    """
    means = [sum(column) / len(layer) or 1.0 for column in zip(*layer, strict=True)]
    favours = [[share / mean for share, mean in zip(row, means, strict=True)] for row in layer]

    def place(expert: int) -> tuple[int, float]:
        column = [row[expert] for row in favours]
        return column.index(max(column)), -max(column)

    return sorted(range(len(means)), key=place)


def mean_distances(shares: Shares) -> list[float]:
    """The Jensen-Shannon distance of two skills in each layer, averaged over all pairs of skills."""
    rows = distances({name: torch.tensor(layers) for name, layers in shares.items()}).values()
    return [sum(layer) / len(layer) for layer in zip(*rows, strict=True)]


def draw(title: str, shares: Shares) -> str:
    """An SVG with a map for each layer."""
    largest = max(share for layers in shares.values() for layer in layers for share in layer)
    panels = [
        _panel(number, distance, [layers[number] for layers in shares.values()], list(shares), largest)
        for number, distance in enumerate(mean_distances(shares))
    ]
    return page(title, panels, COLUMNS, TOP + ROW * len(shares) + 44)


def _panel(
    number: int, distance: float, layer: Sequence[Sequence[float]], names: Sequence[str], largest: float
) -> Panel:
    order = sort_experts(layer)
    wide, tall = WIDTH - LEFT - RIGHT, ROW * len(names)
    rows = [[row[expert] for expert in order] for row in layer]
    place = f"translate({LEFT},{TOP}) scale({wide / len(order):.4f},{ROW})"
    parts = [
        f'<g transform="{place}" shape-rendering="crispEdges">',
        *(*cells(rows, largest), "</g>"),
        f'<path class="border" d="M{LEFT},{TOP} h{wide} v{tall} h-{wide} z"/>',
    ]
    parts += [
        f'<text class="y" x="{LEFT - 6}" y="{TOP + ROW * row + 13}">{escape(name)}</text>'
        for row, name in enumerate(names)
    ]
    parts += _scale(TOP + tall + 10, largest)
    return Panel(f"layer {number}", parts, f"mean distance of two skills: {distance:.2f}")


def _scale(y: int, largest: float) -> list[str]:
    """The shades below a map, from 0 to the largest share."""
    squares = [
        f'<rect class="cell" fill-opacity="{shade / SHADES:g}" x="{LEFT + 26 + 14 * shade}" y="{y}" '
        'width="14" height="10"/>'
        for shade in range(SHADES + 1)
    ]
    end = LEFT + 26 + 14 * (SHADES + 1)
    frame = f'<path class="grid" d="M{LEFT + 26},{y} h{end - LEFT - 26} v10 H{LEFT + 26} z"/>'
    texts = f'<text x="{LEFT}" y="{y + 10}">0 %</text><text x="{end + 6}" y="{y + 10}">{largest:.0%}'
    return [*squares, frame, f"{texts} of the skill's choices</text>"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("evaluation", type=Path, help="what evaluate_demo.py wrote")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    options = parser.parse_args(arguments)
    shares = read_shares(options.evaluation)
    options.picture.write_text(draw(TITLE, shares), encoding="utf-8")
    said = ", ".join(f"{distance:.3f}" for distance in mean_distances(shares))
    print(f"{options.picture}: {len(shares)} skills; mean distance of two by layer {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
