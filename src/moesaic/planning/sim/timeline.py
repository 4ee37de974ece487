"""Virtual time: a heap of what happens next, and processes that wait for it.

Events of the same time happen by priority, and then in the order in which they were set. So equal inputs
give equal runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from typing import NamedTuple

DELIVER, RESUME, SAMPLE = 0, 1, 2
"""Priorities. What arrives at a moment is there when a process goes on at that moment."""


class Sleep(NamedTuple):
    """A process sleeps until it is woken, at most until `time`."""

    time: float = math.inf


Waits = Generator[float | Sleep, None, None]
"""The code of a process. It yields the seconds for which it computes, or `Sleep`."""


class Timeline:
    """The clock, and the events to come."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.events = 0
        """Events so far."""
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._set = 0

    def schedule(self, time: float, action: Callable[[], None], priority: int = DELIVER) -> None:
        """Do this at `time`, seconds. A time that has passed counts as now."""
        self._set += 1
        heapq.heappush(self._heap, (max(time, self.now), priority, self._set, action))

    def run(self, end_time: float = math.inf) -> None:
        """Let everything happen up to and including this time. The clock stands at it then.

        Without a limit the run ends when nothing is set any more.
        """
        heap = self._heap
        while heap and heap[0][0] <= end_time:
            self.now, _, _, action = heapq.heappop(heap)
            self.events += 1
            action()
        if end_time < math.inf:
            self.now = end_time


class Process:
    """A process of the cluster. It computes, sleeps and is woken."""

    def __init__(self, timeline: Timeline, code: Waits) -> None:
        self._timeline = timeline
        self._code = code
        self._ticket = 0
        """Number of the resumption that counts. Earlier ones are void."""
        self._sleeps = False
        self._resume_time = -math.inf
        """Until when it does nothing."""
        self._set(timeline.now)

    def wake(self) -> None:
        """Go on now if it sleeps."""
        if self._sleeps:
            self._sleeps = False
            self._set(self._timeline.now)

    def freeze(self, resume_time: float) -> None:
        """Do nothing until then. What it computes meanwhile ends later by as much at the most."""
        self._resume_time = resume_time

    def stop(self) -> None:
        """End at once, as a killed process."""
        self._ticket += 1
        self._sleeps = False
        self._resume_time = math.inf
        self._code.close()

    def _set(self, time: float) -> None:
        self._ticket += 1
        ticket = self._ticket
        self._timeline.schedule(time, lambda: self._resume(ticket), RESUME)

    def _resume(self, ticket: int) -> None:
        # The process was woken before this time, so a later resumption counts.
        if ticket != self._ticket:
            return
        self._sleeps = False
        if self._resume_time > self._timeline.now:
            self._set(self._resume_time)
            return
        waits = next(self._code, None)
        if waits is None:
            self._ticket += 1
        elif isinstance(waits, Sleep):
            self._sleeps = True
            if waits.time < math.inf:
                self._set(waits.time)
        else:
            self._set(self._timeline.now + waits)


class Idle:
    """Seconds for which a process slept, by what it waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._seconds: dict[str, float] = {}
        self._sleep_start = 0.0
        self._cause: str | None = None

    def begin(self, cause: str) -> None:
        """It falls asleep."""
        self._sleep_start, self._cause = self._timeline.now, cause

    def end(self) -> None:
        """It goes on."""
        self._seconds, self._cause = self.seconds, None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by cause, with those of a sleep under way."""
        if self._cause is None:
            return self._seconds
        sleep_seconds = self._timeline.now - self._sleep_start
        return {**self._seconds, self._cause: self._seconds.get(self._cause, 0.0) + sleep_seconds}
