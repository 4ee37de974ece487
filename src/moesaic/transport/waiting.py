"""Waits for many connections at once: polls for a moment, asks the peers for a wakeup, polls again, then
sleeps.

A peer that answers within that moment costs no system call on either side. A later one sees that this end
asked for a wakeup, and sends it. When a process dies its socket closes, which wakes the sleeper as well.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Sequence

from moesaic.transport.calls import End

SPIN_SECONDS = 50e-6
"""Seconds of polling before sleeping: a few times what it takes to wake a process."""


def wait(
    ends: Sequence[End], fds: Iterable[int] = (), timeout: float | None = None, spin: float = SPIN_SECONDS
) -> bool:
    """Wait until some end's `poll` has news or one of `fds` is readable. Returns False after `timeout`.

    timeout: seconds. None waits without limit, 0 only looks.
    spin: seconds of polling. 0 sleeps at once, which is right when other processes need the core more.

    The result may be True although there is no news.
    """
    if any(end.ready() for end in ends):
        return True
    start = time.monotonic()
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    for end in ends:
        poller.register(end.fileno(), end.events)
    spin_end = start + (spin if timeout is None else min(spin, timeout))
    while True:
        if any(end.ready() for end in ends) or poller.poll(0):
            return True
        if time.monotonic() >= spin_end:
            break
        os.sched_yield()
    left = None if timeout is None else start + timeout - time.monotonic()
    return (left is None or left > 0) and _sleep(ends, poller, left)


def yield_core() -> None:
    """Yield this core to a process that waits for it.

    Call it after sending what peers wait for, and before other work. With few cores, a peer may be runnable
    and wait for this very core. Otherwise the call costs almost nothing.
    """
    os.sched_yield()


def _sleep(ends: Sequence[End], poller: select.poll, seconds: float | None) -> bool:
    """Sleep until some end's socket becomes ready. Returns whether there is news."""
    has_news = [end.arm() for end in ends]  # arm all of them, even if one has news
    try:
        if any(has_news):
            return True
        return bool(poller.poll(None if seconds is None else max(1, round(seconds * 1e3))))
    finally:
        for end in ends:
            end.disarm()
