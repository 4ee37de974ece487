"""Runs a loop in a thread, and starts another thread when that one has died or hangs.

The loop shows that it lives by calling `beat`. A thread that hangs cannot be ended from outside. So another
one takes its place at once, and the old one gets an exception that ends it as soon as it runs again.

Question: Who restarts the supervisor's thread?
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from moesaic.cluster.member import RestartRule

LOG = logging.getLogger(__name__)
TURN = 0.5
"""Seconds between two looks at the thread."""
HUNG_SECONDS = 20.0
"""Seconds without a sign of life after which the thread hangs. The longest wait in one action of the
supervisor has 5 s: that for the end of a process."""


class ThreadReplaced(BaseException):
    """Ends a thread that hung: another one has its work."""


class Watchdog:
    """The watch over one loop. Seconds are counted as turns of its own thread, so a process that was stopped
    as a whole does not count as one whose loop hangs."""

    def __init__(
        self,
        loop: Callable[[], None],
        resume: Callable[[], None],
        fault: Callable[[str, BaseException | None], None],
        give_up: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """loop: returns once it was asked to. resume: runs in each thread but the first, before `loop`.
        fault: called with what happened to a thread whose place another one takes. give_up: called with what
        happened to the last thread."""
        self._loop, self._resume, self._fault, self._give_up = loop, resume, fault, give_up
        self._clock = clock
        self.rule = RestartRule()
        self.hung_seconds = HUNG_SECONDS
        self.is_armed = False
        """False: the first fault is the last one, and a thread may take as long as it wants."""
        self.restarts = 0
        self._faults: list[float] = []
        """When threads died, on a clock that stands still while one hangs."""
        self._hung = 0.0
        """Seconds in which threads hung."""
        self._beats = 0
        self._error: BaseException | None = None
        """What ended the thread."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = self._make_thread(loop)
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the loop and the watch."""
        self._thread.start()
        self._watcher.start()

    def beat(self) -> None:
        """A sign of life of the loop. Raises Replaced in a thread that is not the loop's any more."""
        if threading.current_thread() is not self._thread:
            raise ThreadReplaced
        self._beats += 1

    def stop(self, ask: Callable[[], None]) -> None:
        """Ends the watch and the loop. ask: asks the loop to return."""
        self._stopping.set()
        ask()
        self._wake.set()
        # A thread that was never started cannot be joined.
        if self._watcher.ident is not None:
            self._watcher.join()
        if self._thread.ident is not None:
            self._thread.join(self.hung_seconds)

    # ---- internal

    def _make_thread(self, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(run,), name="supervisor", daemon=True)

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ThreadReplaced:
            LOG.warning("a thread of the supervisor that had hung has ended")
        except BaseException as error:  # also SystemExit, with which a thread would end without a word
            if threading.current_thread() is self._thread:
                self._error = error
                self._wake.set()

    def _watch(self) -> None:
        beats, idle_turns, alive = self._beats, 0, self._clock()
        while not self._stopping.is_set():
            self._wake.wait(TURN)
            self._wake.clear()
            if self._beats == beats:
                idle_turns += 1
            else:
                beats, idle_turns, alive = self._beats, 0, self._clock()
            if self._stopping.is_set():
                return
            if self._error is not None or not self._thread.is_alive():
                error, self._error = self._error, None
                has_restarted = self._restart_loop(f"its thread died: {type(error).__name__}: {error}", error)
            elif self.is_armed and idle_turns * TURN >= self.hung_seconds:
                self._hung += self._clock() - alive
                has_restarted = self._restart_loop(f"its thread hangs {self._locate_hang()}", None)
            else:
                continue
            if not has_restarted:
                return
            beats, idle_turns, alive = self._beats, 0, self._clock()

    def _restart_loop(self, reason: str, error: BaseException | None) -> bool:
        """Starts another thread, if the rule allows one. Returns whether it does."""
        now = self._clock() - self._hung
        self._faults = [fault for fault in self._faults if now - fault < self.rule.window] + [now]
        delay = self.rule.delay(len(self._faults))
        # From here on `beat` raises in the old thread, if that ever runs again.
        old, self._thread = self._thread, self._make_thread(self._resume_loop)
        _end(old)
        if delay is None or not self.is_armed:
            self._give_up(reason)
            return False
        self._fault(reason, error)
        self._wake.wait(delay)  # only `stop` sets it now
        if not self._stopping.is_set():
            self.restarts += 1
            self._thread.start()
        return True

    def _resume_loop(self) -> None:
        self._resume()
        self._loop()

    def _locate_hang(self) -> str:
        """The line at which the thread hangs, in words. The log gets the whole stack."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame)
        LOG.warning("the supervisor's thread hangs:\n%s", "".join(traceback.format_list(stack)))
        return f"in {stack[-1].name} ({Path(stack[-1].filename).name}, line {stack[-1].lineno})"


def _end(thread: threading.Thread) -> None:
    """Ends a thread as soon as it runs Python code again. It may have ended already."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(ThreadReplaced)
        )
