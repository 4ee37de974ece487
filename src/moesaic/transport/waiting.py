"""Waits for several ends at once: look for a moment, set the wake-up flags, look once more, sleep.

A peer that answers within that moment costs no system call on either side. A later peer sees the flag and
writes to the socket. The death of a process ends its socket, which wakes the sleeper as well.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Sequence

from moesaic.transport.calls import End

SPIN_SECONDS = 50e-6
"""Seconds to look before sleeping: a few times what it takes to wake a process."""


def wait(
    ends: Sequence[End], fds: Iterable[int] = (), timeout: float | None = None, spin: float = SPIN_SECONDS
) -> bool:
    """True as soon as some end's `poll` has to be called or one of `fds` can be read.

    timeout: seconds; None waits for ever, 0 only looks. spin: seconds to look before sleeping; 0 sleeps at
    once, which is right if other processes need the core more. False after the timeout. A True may come too
    early.
    """
    if any(end.ready() for end in ends):
        return True
    started = time.monotonic()
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    for end in ends:
        poller.register(end.fileno(), end.events)
    until = started + (spin if timeout is None else min(spin, timeout))
    while True:
        if any(end.ready() for end in ends) or poller.poll(0):
            return True
        if time.monotonic() >= until:
            break
        os.sched_yield()
    left = None if timeout is None else started + timeout - time.monotonic()
    return (left is None or left > 0) and _sleep(ends, poller, left)


def give_way() -> None:
    """Give the core to another process. Call it after a message to a peer, before work that nobody waits
    for: with few cores the peer may be waiting for this core. Otherwise it costs next to nothing."""
    os.sched_yield()


def _sleep(ends: Sequence[End], poller: select.poll, seconds: float | None) -> bool:
    """Sleep until the socket of some end has news. True if there is news."""
    armed = [end.arm() for end in ends]  # all of them, even after one that has news
    try:
        if any(armed):
            return True
        return bool(poller.poll(None if seconds is None else max(1, round(seconds * 1e3))))
    finally:
        for end in ends:
            end.disarm()
