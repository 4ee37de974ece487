"""Limits how often lines of one kind are logged, so that a port scan does not fill the log."""

from __future__ import annotations

import math


class LineLimit:
    """Returns the lines to log: the first at once, then at most one in `seconds`, which counts the others.

    `now` is always the time in seconds on one monotonic clock.

    >>> limit = LineLimit(seconds=10.0)
    >>> limit.add("refused A", now=0.0)
    'refused A'
    >>> limit.add("refused B", now=1.0)
    >>> limit.add("refused C", now=2.0)
    >>> limit.due(now=10.0)
    'refused C (the last of 2 such lines in 10 s)'
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._log_time = -math.inf
        """Time of the last line."""
        self._pending_line, self._count = "", 0
        """The latest line that was not logged, and how many there are."""

    def add(self, line: str, now: float) -> str | None:
        """Add a line. Returns what to log now, or None."""
        if not self._count and now - self._log_time >= self._seconds:
            self._log_time = now
            return line
        self._pending_line, self._count = line, self._count + 1
        return self.due(now)

    def due(self, now: float) -> str | None:
        """The line for those that were held back, once it is time for it. None otherwise."""
        return self.flush(now) if now - self._log_time >= self._seconds else None

    def flush(self, now: float) -> str | None:
        """The line for those that were held back. None if there are none."""
        count, seconds = self._count, now - self._log_time
        if not count:
            return None
        self._log_time, self._count = now, 0
        if count == 1:
            return self._pending_line
        return f"{self._pending_line} (the last of {count} such lines in {math.ceil(seconds)} s)"
