"""The order in which a worker's scheduler gets its events. The worker and the simulated one share it."""

from __future__ import annotations

from collections import deque

from moesaic.policy.scheduling.schedulers.actions import (
    Event,
    RequestsArrived,
    SegmentDone,
    StepDone,
    StepFailed,
)


def put(events: deque[Event], event: Event) -> None:
    """Queue an event, but before the end of a step.

    Consecutive arrivals become one event, so they join the same step.
    """
    # An arrival that overtakes the end of a step joins the very next step.
    is_end = events and isinstance(events[-1], StepDone | StepFailed | SegmentDone)
    end = events.pop() if is_end else None
    last = events[-1] if events else None
    if isinstance(event, RequestsArrived) and isinstance(last, RequestsArrived):
        last.extend(event)
    else:
        events.append(event)
    if end is not None:
        events.append(end)
