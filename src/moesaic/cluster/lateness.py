"""Leaves out of the silence of processes the time in which the supervisor itself stood still.

The whole machine may have been stopped meanwhile, such as a virtual machine or a container that was paused.
Then no process could send anything, and what arrived before is still to be read. So silence is counted in
turns of the supervisor's loop, each of which has a maximum length.
"""

from __future__ import annotations

from collections.abc import Iterable

from moesaic.cluster.member import Member


class Lateness:
    """Knows when the supervisor's loop ran last. Only its thread uses it."""

    def __init__(self, turn: float) -> None:
        """turn: seconds that one turn of the loop may take. What it takes beyond them is no silence."""
        self._turn = turn
        self._last: float | None = None

    def excuse(self, members: Iterable[Member], now: float) -> None:
        """Called once in each turn, at the time `now` on the clock of `Member.last_seen`."""
        late = 0.0 if self._last is None else now - self._last - self._turn
        self._last = now
        if late > 0:
            for member in members:
                member.last_seen = min(now, member.last_seen + late)
