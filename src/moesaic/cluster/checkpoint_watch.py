"""Whether processes of this host can load the checkpoint: whether its files are those of the start.

All processes must hold the same weights. So a process is only started while the files have the size, times
and inode of the start, or once other files have the same fingerprint and are quiet. A thread of its own looks
at them, since a file system that hangs must not stop the supervisor.

Question: What happens when a file of the checkpoint is missing or changed while it is served?
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import CheckpointError
from moesaic.models import fingerprint
from moesaic.models.file_state import FileState, read_state

LOG = logging.getLogger(__name__)
TURN = 1.0
"""Seconds between two looks at the files."""
QUIET_SECONDS = 5.0
"""Seconds that files must be unchanged before they are compared with those of the start."""

States = dict[Path, FileState | None]
"""File -> its state; None: there is no such file."""


@dataclass(frozen=True)
class Verdict:
    """What the files mean for processes."""

    obstacle: str | None
    """Why no process may load the files, in words for people. None: one may."""
    stamp: str
    """The stamp (`models.fingerprint`) of the files that may be loaded."""


class CheckpointGate:
    """Decides whether processes may load the files, from their states at several times."""

    def __init__(self, files: States, compare: Callable[[], str | None]) -> None:
        """files: at the start. compare: returns how the contents differ from those of the start, in words for
        people; None if they do not."""
        self._accepted_states = dict(files)
        self._last = dict(files)
        self._change_time = 0.0
        self._compare = compare
        self._difference: str | None = None
        """How the contents of `_compared_states` differ from those of the start."""
        self._compared_states: States | None = None

    def explain(self, states: States, now: float) -> str | None:
        """Why no process may load the files now, in words for people; None if one may."""
        for file, state in states.items():
            if state is None:
                self._last = dict(states)
                return f"{file}: this file is missing; processes are started again once it is there"
        if states != self._last:
            self._last, self._change_time = dict(states), now
        if states == self._accepted_states:
            return None
        changed_file = next((file for file in states if states[file] != self._accepted_states[file]), None)
        if not self._has_same_contents(states) and now - self._change_time < QUIET_SECONDS:
            return (
                f"{changed_file}: this file changed; it is compared once it is quiet for {QUIET_SECONDS:g} s"
            )
        if self._compared_states != states:
            self._compared_states, self._difference = dict(states), self._compare()
        if self._difference is not None:
            return f"{changed_file}: this file changed while it was served: {self._difference}"
        LOG.warning("%s: the file's times or inode changed, its sampled bytes did not", changed_file)
        self._accepted_states = dict(states)
        return None

    def _has_same_contents(self, states: States) -> bool:
        """Whether these are the accepted files, and nobody has written to them by ordinary means."""
        return all(
            state is not None and accepted_state is not None and state.has_contents_of(accepted_state)
            for state, accepted_state in ((states[file], self._accepted_states[file]) for file in states)
        )


class CheckpointWatch:
    """Looks at the files of a checkpoint in a thread of its own, from `start` to `stop`."""

    def __init__(self, path: Path, stamp: str, report: Callable[[Verdict], None]) -> None:
        """stamp: of the files at the start. report: called from the thread with each new verdict."""
        self._path, self._stamp, self._report = path, stamp, report
        self._fingerprint: str | None = None
        """The fingerprint of the files at the start. None: it is not known."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end. It may be in a call that the file system never ends."""
        self._stop.set()

    def _run(self) -> None:
        try:
            files = fingerprint.list_files(self._path)
            gate = CheckpointGate({file: read_state(file) for file in files}, self._compare)
            if fingerprint.stamp(self._path) == self._stamp:
                self._fingerprint = fingerprint.compute_fingerprint(self._path)
        except CheckpointError as error:
            self._report(Verdict(str(error), self._stamp))
            return
        verdict = Verdict(None, self._stamp)
        while not self._stop.wait(TURN):
            last_verdict = verdict
            verdict = self._judge(gate, files)
            if verdict != last_verdict:
                self._report(verdict)

    def _judge(self, gate: CheckpointGate, files: list[Path]) -> Verdict:
        try:
            obstacle = gate.explain({file: read_state(file) for file in files}, time.monotonic())
            self._stamp = self._stamp if obstacle else fingerprint.stamp(self._path)
        except CheckpointError as error:  # a file changed between two looks
            obstacle = str(error)
        return Verdict(obstacle, self._stamp)

    def _compare(self) -> str | None:
        """How the contents differ from those of the start."""
        if self._fingerprint is None:
            return "those of the start are not known; restart the server to serve the new files"
        try:
            difference = fingerprint.difference(
                self._fingerprint, fingerprint.compute_fingerprint(self._path)
            )
        except CheckpointError as error:
            return str(error)
        advice = "restart the server to serve the new files, or put the old ones back"
        return f"it has other {difference} than at the start; {advice}" if difference else None
