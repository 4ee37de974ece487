"""Draws activation maps of several placements side by side, as an SVG. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise

from moesaic.commands.panels import WIDTH, Panel, cells, page
from moesaic.policy.placement.activation_map import ActivationMap

LEFT, TOP, WIDE, TALL = 30, 88, WIDTH - 46, 480
"""Position and size of the map in its panel, in pixels."""
HEIGHT = TOP + TALL + 30
LABELS = 16
"""Maximum number of ranks whose names are drawn along a side."""


def draw(title: str, maps: Sequence[tuple[str, ActivationMap]]) -> str:
    """An SVG with one panel for each named map. It shows the map's local share and all choices of experts.

    Local choices have one colour and remote ones another. Frequent choices are darker.
    """
    return page(
        title,
        [_panel(name, activation_map) for name, activation_map in maps],
        columns=len(maps),
        height=HEIGHT,
    )


def _panel(name: str, activation_map: ActivationMap) -> Panel:
    scale = f"scale({WIDE / len(activation_map.experts):.4f},{TALL / len(activation_map.tokens):.4f})"
    local_shares, remote_shares = (_select_shares(activation_map, local) for local in (True, False))
    local_text = f"{activation_map.local:.1%}"
    return Panel(
        name,
        [
            f'<text x="8" y="40">{local_text} of the choices stay on the rank of the token</text>',
            *(_key(8, "cell", "expert on the token's rank"), _key(220, "far", "expert on another rank")),
            f'<g transform="translate({LEFT},{TOP}) {scale}" shape-rendering="crispEdges">',
            *(*cells(local_shares, 1.0), *cells(remote_shares, 1.0, "far"), "</g>"),
            *_borders(activation_map),
            f'<text class="x" x="{LEFT + WIDE / 2}" y="{HEIGHT - 12}">{_axes(activation_map)}</text>',
        ],
    )


def _select_shares(activation_map: ActivationMap, local: bool) -> list[list[float]]:
    """[n, E] shares of the local choices, or of the remote ones; 0 elsewhere."""
    row_owners, column_owners = _owners(activation_map.tokens_of), _owners(activation_map.experts_of)
    return [
        [
            value if (row_owner == column_owner) is local else 0.0
            for column_owner, value in zip(column_owners, row, strict=True)
        ]
        for row_owner, row in zip(row_owners, activation_map.shares, strict=True)
    ]


def _owners(sizes: Sequence[int]) -> list[int]:
    """The rank of each row or column. Example: sizes 2, 1 -> 0, 0, 1."""
    return [rank for rank, size in enumerate(sizes) for _ in range(size)]


def _borders(activation_map: ActivationMap) -> Iterator[str]:
    """SVG elements: lines between ranks, and the names of the ranks."""
    right, bottom = LEFT + WIDE, TOP + TALL
    has_labels = len(activation_map.experts_of) <= LABELS
    for rank, (begin, end) in enumerate(_spans(activation_map.experts_of, LEFT, WIDE)):
        yield f'<path class="border" d="M{end:.1f},{TOP} V{bottom}"/>'
        if has_labels:
            yield f'<text class="x" x="{(begin + end) / 2:.1f}" y="{TOP - 6}">rank {rank}</text>'
    for rank, (begin, end) in enumerate(_spans(activation_map.tokens_of, TOP, TALL)):
        yield f'<path class="border" d="M{LEFT},{end:.1f} H{right}"/>'
        if has_labels and end - begin > 40:
            place = f"translate({LEFT - 8},{(begin + end) / 2:.1f}) rotate(-90)"
            yield f'<text class="x" transform="{place}">rank {rank}</text>'
    yield f'<path class="border" d="M{right},{TOP} H{LEFT} V{bottom}"/>'


def _spans(sizes: Sequence[int], start: float, length: float) -> Iterator[tuple[float, float]]:
    """Start and end of each rank, in pixels."""
    ends = [0, *accumulate(sizes)]
    return pairwise(start + length * end / ends[-1] for end in ends)


def _axes(activation_map: ActivationMap) -> str:
    return escape(
        f"down: {len(activation_map.tokens)} token ids; across: {len(activation_map.experts)} experts"
    )


def _key(x: int, kind: str, name: str) -> str:
    square = f'<path class="{kind}" d="M{x},{50} h12v12h-12z"/>'
    return f'{square}<text x="{x + 18}" y="60">{escape(name)}</text>'
