"""The order in which a worker's scheduler gets its events. The worker and the simulated one share it."""

from __future__ import annotations

from collections import deque

from moesaic.policy.scheduling.schedulers.actions import Arrived, Event, SegmentDone, StepDone, StepFailed


def put(events: deque[Event], event: Event) -> None:
    """Queue an event, but before the end of a step.

    Consecutive arrivals become one event, so they join the same step.
    """
    ended = events and isinstance(events[-1], StepDone | StepFailed | SegmentDone)
    end = events.pop() if ended else None
    last = events[-1] if events else None
    if isinstance(event, Arrived) and isinstance(last, Arrived):
        last.extend(event)
    else:
        events.append(event)
    if end is not None:
        events.append(end)
