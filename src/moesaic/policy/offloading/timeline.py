"""Runs a task list in virtual time: when each task begins and ends, and how busy each lane is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.policy.offloading.tasks import Lane, Task


@dataclass(frozen=True)
class Timeline:
    """When tasks begin and end, in seconds from the beginning of the first one."""

    starts: Sequence[float]
    ends: Sequence[float]
    busy: dict[Lane, float]
    """Busy seconds of each lane; 0 for a lane without tasks."""

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def bottleneck(self) -> Lane:
        """The busiest lane."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def run(tasks: Sequence[Task], seconds: Sequence[float], handover: float = 0.0) -> Timeline:
    """Run the task list. Each lane runs its tasks in order.

    A task begins when its lane is free and the tasks that it needs have ended. seconds: duration of each
    task. handover: seconds between a task's end and the beginning of a task on another lane that needs it.
    """
    free = dict.fromkeys(Lane, 0.0)
    busy = dict.fromkeys(Lane, 0.0)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for index, (task, duration) in enumerate(zip(tasks, seconds, strict=True)):
        begin = free[task.lane]
        for need in task.needs:
            known = ends[need]
            if handover and tasks[need].lane is not task.lane:
                known += handover
            if known > begin:
                begin = known
        end = begin + duration
        starts[index], ends[index], free[task.lane] = begin, end, end
        busy[task.lane] += duration
    return Timeline(starts, ends, busy)
