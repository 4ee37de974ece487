"""Revises the plan of a server whose model is larger than the fast memory, as its load changes.

Before serving, the planner prices several ways to compute a decode step, each at several loads. Here the load
of each step decides which of them is taken. Another one is only taken where it has been clearly faster for
several steps. So a load that changes back and forth does not change the plan each time.

Question: How does `serve --fast-memory` follow its load?
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesaic.core.offload import Choice, Load

GAIN = 1.1
"""A plan is left for one that is this many times as fast."""
PATIENCE = 4
"""Decode steps in a row for which another plan has to be that much faster."""


class Revising:
    """Chooses how decode steps are computed.

    >>> loads = Load(1, 512), Load(64, 512)
    >>> few = Choice("on-demand", 1, 0, (1.0, 40.0))
    >>> many = Choice("cgopipe", 16, 0, (9.0, 10.0))
    >>> revising = Revising(loads, (few, many))
    >>> [revising.choose(count, 500.0).schedule for count in (1, 64, 1, 64, 64, 64, 64)]
    ['on-demand', 'on-demand', 'on-demand', 'on-demand', 'on-demand', 'on-demand', 'cgopipe']
    >>> revising.revisions
    1
    """

    def __init__(self, loads: Sequence[Load], choices: Sequence[Choice]) -> None:
        """loads: for which every choice has a price. Raises ValueError if there is none of either."""
        if not loads or not choices:
            raise ValueError("a plan is revised between choices with prices")
        self._loads, self._choices = loads, choices
        self._now: Choice | None = None
        self._steps = 0
        """Steps in a row for which another choice was that much faster."""
        self.revisions = 0
        """Number of changes after the first choice."""

    def choose(self, requests: int, context: float) -> Choice:
        """The choice for a decode step of so many requests. context: mean tokens of each in the cache."""
        place = nearest(self._loads, requests, context)
        best = min(self._choices, key=lambda choice: choice.seconds[place])
        if self._now is None:
            self._now = best
        faster = self._now.seconds[place] > GAIN * best.seconds[place]
        self._steps = self._steps + 1 if faster else 0
        if self._steps >= PATIENCE:
            self._now, self._steps = best, 0
            self.revisions += 1
        return self._now


def nearest(loads: Sequence[Load], requests: int, context: float) -> int:
    """Index of the load that is nearest by ratio. The number of requests counts first.

    >>> nearest((Load(1, 512), Load(8, 512), Load(8, 4096)), 6, 2000.0)
    2
    """

    def distance(load: Load) -> tuple[float, float]:
        return abs(math.log(load.requests / requests)), abs(math.log(load.context / max(context, 1.0)))

    return min(range(len(loads)), key=lambda index: distance(loads[index]))
