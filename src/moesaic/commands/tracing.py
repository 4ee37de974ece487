"""Prints where a run has written its trace and its recorded routing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from moesaic.commands.program import program
from moesaic.trace.options import RecordConfig


@contextmanager
def announced(
    trace: str | None, said: str = "the trace is in {}: open it at https://ui.perfetto.dev"
) -> Iterator[None]:
    """At the end of the block, print on stderr where the trace is and what opens it.

    Prints nothing if no trace was wanted, or if none was written since the run failed at its start.
    said: the message, with {} in place of the file.
    """
    before = _state(trace)
    try:
        yield
    finally:
        if _state(trace) not in (None, before):
            print(f"moesaic: {said.format(trace)}", file=sys.stderr)


def announced_routing(record: RecordConfig) -> AbstractContextManager[None]:
    """The same for the profile of --record-routing."""
    said = f"the routing is in {{0}}: print it with {program()} profile show {{0}}"
    return announced(record.record_routing, said)


def _state(trace: str | None) -> tuple[int, int] | None:
    """(modification time, size in bytes) of the file. None if it is missing or empty."""
    if trace is None or not Path(trace).is_file():
        return None
    found = Path(trace).stat()
    return (found.st_mtime_ns, found.st_size) if found.st_size else None
