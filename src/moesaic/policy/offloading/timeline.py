"""A list of tasks in virtual time: when each begins and ends, and how busy each lane is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.policy.offloading.tasks import Lane, Task


@dataclass(frozen=True)
class Timeline:
    """Seconds from the beginning of the first task."""

    starts: Sequence[float]
    ends: Sequence[float]
    busy: dict[Lane, float]
    """Of every lane, 0 where nothing stands on it."""

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def bottleneck(self) -> Lane:
        """The busiest lane."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def run(tasks: Sequence[Task], seconds: Sequence[float], handover: float = 0.0) -> Timeline:
    """Each lane does its tasks in order; a task begins when its lane is free and what it needs has ended.

    seconds: of each task. handover: seconds until another lane knows that something has ended.

    Example: two lanes, tasks a (fast, 2 s), b (down, 3 s), c (fast, 1 s, needs b): c begins at 3; busy
    fast 3, down 3, makespan 4. With a handover of 0.5 s c begins at 3.5.
    """
    free = dict.fromkeys(Lane, 0.0)
    busy = dict.fromkeys(Lane, 0.0)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for place, (task, duration) in enumerate(zip(tasks, seconds, strict=True)):
        begin = free[task.lane]
        for need in task.needs:
            known = ends[need]
            if handover and tasks[need].lane is not task.lane:
                known += handover
            if known > begin:
                begin = known
        end = begin + duration
        starts[place], ends[place], free[task.lane] = begin, end, end
        busy[task.lane] += duration
    return Timeline(starts, ends, busy)
