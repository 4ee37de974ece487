"""Wakes a loop that sleeps on file descriptors, from another thread of the same process."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """A pipe that never fills: `ring` makes `fileno` readable until `clear`."""

    def __init__(self) -> None:
        self._closing = threading.Lock()
        self._is_closed = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self.rung = False
        """Whether `ring` was called since `clear`. It replaces polling `fileno`, without a system call."""

    def fileno(self) -> int:
        """A descriptor that is readable after `ring`, until `clear`."""
        return self._reading

    def ring(self) -> None:
        """Wake the loop, from any thread.

        After `close` it does nothing, because the descriptor may be reused.
        """
        with self._closing:
            if self._is_closed:
                return
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
                os.write(self._writing, b"\0")
            # Set last: if `clear` reset it before the byte was written, no call would ever read that byte.
            self.rung = True

    def clear(self) -> None:
        """Reset. Call it before reading what the loop was woken for."""
        if not self.rung:
            return
        self.rung = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass

    def close(self) -> None:
        """Close the pipe. A second call does nothing."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed, self.rung = True, False  # so that `clear` reads nothing any more
            os.close(self._reading)
            os.close(self._writing)
