"""Wakes a loop that sleeps on file descriptors, from another thread of the same process."""

from __future__ import annotations

import contextlib
import os
import threading


class Wakeup:
    """A pipe that never fills: `ring` makes `fileno` readable until `clear`."""

    def __init__(self) -> None:
        self._closing = threading.Lock()
        self._closed = False
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self.rung = False
        """Whether it was rung since `clear`: what `fileno` shows, without a system call."""

    def fileno(self) -> int:
        return self._reading

    def ring(self) -> None:
        """From any thread. Nothing happens after `close`: the descriptor may be somebody else's by then."""
        with self._closing, contextlib.suppress(BlockingIOError):  # full: it rings already
            if not self._closed:
                os.write(self._writing, b"\0")
        # Last: if `clear` comes before the byte and takes `rung` with it, nobody would ever read that byte.
        self.rung = True

    def clear(self) -> None:
        """Before looking at what it rang for."""
        if not self.rung:
            return
        self.rung = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass

    def close(self) -> None:
        with self._closing:
            self._closed = True
            os.close(self._reading)
            os.close(self._writing)
