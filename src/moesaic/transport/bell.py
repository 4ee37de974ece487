"""Wakes a loop that sleeps on file descriptors, from another thread of the same process."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """A pipe that never fills: `ring` makes `fileno` readable until `clear`."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self.rung = False
        """Whether it was rung since `clear`: what `fileno` shows, without a system call."""

    def fileno(self) -> int:
        return self._reading

    def ring(self) -> None:
        """From any thread."""
        self.rung = True
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: nobody listens
            os.write(self._writing, b"\0")

    def clear(self) -> None:
        """Before looking at what it rang for."""
        if not self.rung:
            return
        self.rung = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)
