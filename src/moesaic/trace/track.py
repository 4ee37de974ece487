"""Writes the part of a process in a trace: rows of spans, in a file that outlives the process.

Events are lines of Chrome's trace event format. They are written to mapped memory of the file, so they
survive the process. There is no buffer to flush. SIGKILL loses at most the line that it interrupts.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.trace.parts import new_file, process_name, row_order, trace_path

LOG = logging.getLogger(__name__)
WINDOW = 1 << 20
"""Bytes of the file that are mapped at a time, enough for about 8000 events."""


MOST_IDS = 1 << 22
"""More than any process id on Linux. Further rows get numbers above it."""


class Row:
    """An additional row of a process, used by the same thread."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write

    def span(self, name: str, begin: float, end: float, **arguments: object) -> None:
        """Writes a span of this row, as `Track.span` does for the first one."""
        self._write("X", name, args=arguments, **_microseconds(begin, end))


class Track:
    """A row of the trace, used by one thread. Spans may be nested; the outer one is written first.

    A full disk ends the row, not the process.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """path: from `parts.part_path`. clock: monotonic seconds, the same clock for all processes of a host.

        Raises ConfigError if the file cannot be written.
        """
        self.now = clock
        self._path = path
        self._process = process_name(path)
        # The viewer shows processes with one parent as threads of it, so their rows stay together.
        self._ids = {"pid": os.getppid(), "tid": os.getpid()}
        self._size = self._offset = 0
        try:
            self._file = new_file(path, 0o644)
            self._window: mmap.mmap | None = self._next_window()
        except OSError as error:
            raise ConfigError.field(
                "--trace", trace_path(str(path)), f"a file to write into ({error.strerror})"
            ) from error
        self._write(b"[\n")
        self._name_row()

    def span(self, name: str, begin: float, end: float, **arguments: object) -> None:
        """Writes a span from `begin` to `end`, in seconds.

        Both are rounded down to whole microseconds, so nested and adjacent spans stay so. Example:
        span("layer 3", 1.0000019, 1.0000051, rows=8) is at 1000001, with length 4.
        """
        self._event("X", name, args=arguments, **_microseconds(begin, end))

    def row(self, name: str, number: int) -> Row:
        """Adds another row of this process, `number` (from 1) rows below the first.

        Example: row("link down", 3) of expert server 0 -> "expert server 0: link down"
        """
        ids = {"pid": self._ids["pid"], "tid": self._ids["tid"] + number * MOST_IDS}
        self._name(f"{self._process}: {name}", ids)
        return Row(partial(self._event, ids=ids))

    def count(self, name: str, value: int) -> None:
        """Writes the new value of a counter, which has its own row below the others.

        Perfetto shows the argument's name after the event's: "expert server 0: pairs waiting".
        """
        self._event("C", f"{self._process}:", ts=int(self.now() * 1e6), args={name: value})

    def close(self) -> None:
        """Closes the file; nothing more is written. A process that ends need not close it."""
        if self._window is not None:
            self._window.close()
            self._window = None
        os.close(self._file)

    def _name_row(self) -> None:
        """Names the row. The viewer shows the starting process as a process and the others as its threads,
        in rows below it."""
        self._event("M", "process_name", args={"name": "moesaic"})
        self._name(self._process)

    def _name(self, name: str, ids: Mapping[str, int] | None = None) -> None:
        self._event("M", "thread_name", ids, args={"name": name})
        self._event("M", "thread_sort_index", ids, args={"sort_index": row_order(self._process)})

    def _event(self, kind: str, name: str, ids: Mapping[str, int] | None = None, **fields: object) -> None:
        """Writes an event. ids: those of the row, if it is not the first."""
        if self._window is None:
            return
        event = {"ph": kind, "name": name, **(ids or self._ids), **fields}
        self._write(json.dumps(event, separators=(",", ":")).encode() + b",\n")

    def _write(self, line: bytes) -> None:
        if self._offset + len(line) > WINDOW:
            self._advance()
        window = self._window
        if window is not None:
            end = self._offset + len(line)
            window[self._offset : end - 1] = line[:-1]
            window[end - 1] = line[-1]  # the end of the line marks it as complete
            self._offset = end

    def _advance(self) -> None:
        """Continues in the next window."""
        old, self._window = self._window, None
        if old is not None:
            old.close()
        try:
            self._window = self._next_window()
        except OSError as error:
            LOG.warning("%s: %s; the trace of this process ends here", self._path, error.strerror)

    def _next_window(self) -> mmap.mmap:
        """Maps the next window. It is written before it is mapped: a full disk would otherwise kill the
        process."""
        blank = memoryview(b" " * WINDOW)
        num_written = 0
        while num_written < WINDOW:
            num_written += os.pwrite(self._file, blank[num_written:], self._size + num_written)
        window = mmap.mmap(self._file, WINDOW, offset=self._size)
        self._size += WINDOW
        self._offset = 0
        return window


def _microseconds(begin: float, end: float) -> dict[str, Any]:
    """Returns begin and length, rounded down. Example: 1.0000019 to 1.0000051 -> 1000001, length 4."""
    start = int(begin * 1e6)
    return {"ts": start, "dur": int(end * 1e6) - start}
