"""What the lanes of a worker write into a trace whose model is larger than its fast memory: a row for each.

A span is a task, by its kind, with its layer and its micro-batch, or page where it loads one.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.policy.offloading.tasks import Kind, Lane, Task
from moesaic.policy.offloading.timeline import Timeline
from moesaic.trace.track import Row, Track

LANES = tuple(Lane)
"""Their rows stand in this order."""


class LaneRows:
    """Is told of passes, and writes what was done in them."""

    def __init__(self, track: Track) -> None:
        """track: the worker's own row."""
        self._track = track
        self._rows: dict[Lane, Row] = {}
        self._passes = 0

    def __call__(self, tasks: Sequence[Task], times: Timeline) -> None:
        """A pass that ended just now."""
        begin = self._track.now() - times.makespan
        for task, start, end in zip(tasks, times.starts, times.ends, strict=True):
            if task.kind is not Kind.SYNC:
                place = "page" if task.kind in (Kind.LOAD_PAGE, Kind.STAGE_PAGE) else "micro_batch"
                what = {"pass": self._passes, "layer": task.layer, place: task.micro_batch}
                self._row(task.lane).span(task.kind.value, begin + start, begin + end, **what)
        self._passes += 1

    def _row(self, lane: Lane) -> Row:
        if lane not in self._rows:
            self._rows[lane] = self._track.row(lane.value, LANES.index(lane) + 1)
        return self._rows[lane]
