"""The same events at the same times must give the same actions, array for array."""

from __future__ import annotations

import numpy as np

from moesaic.core.request import Request
from moesaic.policy.scheduling.schedulers.actions import Action, Event, Scheduler


def replays(scheduler: Scheduler, log: list[tuple[Event, float, list[Action]]]) -> bool:
    """True when a fresh scheduler answers each event of the log as it was answered then."""
    return all(equal(scheduler.handle(event, now), actions) for event, now, actions in log)


def equal(left: object, right: object) -> bool:
    """Equality that looks into records, lists and arrays."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if hasattr(left, "__dataclass_fields__") and not isinstance(left, Request):
        return all(equal(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    return left == right
