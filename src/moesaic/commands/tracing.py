"""Prints where a run has written its trace and its recorded routing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from moesaic.commands.program import program
from moesaic.trace.options import RecordConfig


@contextmanager
def announce_trace(
    trace: str | None, message: str = "the trace is in {}: open it at https://ui.perfetto.dev"
) -> Iterator[None]:
    """At the end of the block, print on stderr where the trace is and what opens it.

    Prints nothing if no trace was wanted, or if none was written since the run failed at its start.
    message: the message, with {} in place of the file.
    """
    # The file of an earlier run must not be announced as that of this one.
    state_before = _state(trace)
    try:
        yield
    finally:
        if _state(trace) not in (None, state_before):
            print(f"moesaic: {message.format(trace)}", file=sys.stderr)


def announce_routing(record: RecordConfig) -> AbstractContextManager[None]:
    """The same for the profile of --record-routing."""
    message = f"the routing is in {{0}}: print it with {program()} profile show {{0}}"
    return announce_trace(record.record_routing, message)


def _state(trace: str | None) -> tuple[int, int] | None:
    """(modification time, size in bytes) of the file. None if it is missing or empty."""
    if trace is None or not Path(trace).is_file():
        return None
    stat = Path(trace).stat()
    return (stat.st_mtime_ns, stat.st_size) if stat.st_size else None
