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
    """Busy seconds of every lane; 0 for a lane without tasks."""

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def bottleneck(self) -> Lane:
        """The busiest lane."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def run(tasks: Sequence[Task], seconds: Sequence[float], handover: float = 0.0) -> Timeline:
    """Run the list: each lane runs its tasks in order; a task begins when its lane is free and the tasks
    that it needs have ended."""
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
