"""The files of weights that a process computes from: whether they are as they were when it loaded them.

A mapped file that is written over in place changes the answers of every process that maps it. So a process
keeps each file open, and looks twice a second at the size and the times of what it has open. A name that
leads to another file now changes nothing, since the old file stays mapped.

Question: What happens when a file is written over in place while a process computes from it?
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from moesaic.core.errors import CheckpointError
from moesaic.models import fingerprint
from moesaic.models.file_state import FileState, OpenFile, read_state

LOG = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
"""Seconds between two looks at the files. A look at 200 files takes 0.05 % of that."""


@contextlib.contextmanager
def watch_files(path: Path, stamp: str, report: Callable[[str], None]) -> Iterator[None]:
    """A context in which a thread looks at the files with the weights of a checkpoint.

    stamp: of the files as they were loaded. report: called once, from the thread, with what has changed.
    Raises CheckpointError if they have changed already.
    """
    served_files = ServedFiles(path, stamp)
    # In a thread, since a file system that hangs must not stop the process.
    threading.Thread(target=served_files.watch, args=(report,), name="served-files", daemon=True).start()
    try:
        yield
    finally:
        served_files.close()


class ServedFiles:
    """The files with the weights of a checkpoint, open until `close`. They are those that were loaded."""

    def __init__(self, path: Path, stamp: str) -> None:
        """stamp: of the files as they were loaded. Raises CheckpointError if they have changed since."""
        self._path = path
        self._files: dict[Path, OpenFile] = {}
        self._fingerprint: str | None = None
        """The fingerprint of the files as they were opened. None: it is not known."""
        self._end_event = threading.Event()
        self._descriptors = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, self._descriptors.close)
        for file in fingerprint.list_weight_files(path):
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read ({error})") from error
            self._descriptors.callback(os.close, descriptor)
            self._files[file] = OpenFile(file, descriptor)
        fingerprint.check_unchanged(path, stamp)

    def close(self) -> None:
        """Close the files. Nothing is reported any more."""
        self._end_event.set()
        self._finalizer()

    def find_change(self) -> str | None:
        """Which file has other bytes than when it was opened, in words for people. None: none has."""
        for file, open_file in self._files.items():
            state = open_file.read_change()
            if state is None:
                continue
            if not state.has_contents_of(open_file.state):
                return open_file.describe_change(state)
            difference = self._compare(file, state)
            if difference is not None:
                return f"{file}: this file changed while it was served: {difference}"
            open_file.state = state
        return None

    def watch(self, report: Callable[[str], None]) -> None:
        """Look at the files until `close`. report: called once, with what has changed."""
        with contextlib.suppress(CheckpointError):
            self._fingerprint = self._read_fingerprint()
        while not self._end_event.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError):  # `close` was called, or the disk fails: reads will say so
                change = self.find_change()
                if change is not None and not self._end_event.is_set():
                    report(change)
                    return

    def _read_fingerprint(self) -> str | None:
        """The fingerprint, if the names still lead to the files as they were opened."""
        result = fingerprint.compute_fingerprint(self._path)
        is_unchanged = all(read_state(file) == open_file.state for file, open_file in self._files.items())
        return result if is_unchanged else None

    def _compare(self, file: Path, state: FileState) -> str | None:
        """How a file whose mode, owner, links or times changed differs, as far as its samples tell."""
        if self._fingerprint is None or read_state(file) != state:
            LOG.warning("%s: its mode, owner, links or times changed; its bytes cannot be compared", file)
            return None
        try:
            difference = fingerprint.difference(
                self._fingerprint, fingerprint.compute_fingerprint(self._path)
            )
        except CheckpointError as error:
            return str(error)
        if not difference:
            LOG.warning("%s: its mode, owner, links or times changed; its sampled bytes did not", file)
        return f"it has other {difference} than at the start" if difference else None
