"""Says where the trace of a run is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def announced(
    trace: str | None, said: str = "the trace is in {}: open it at https://ui.perfetto.dev"
) -> Iterator[None]:
    """Say on stderr, when the block has ended, where the trace of its run is and what opens it.

    Nothing is said where no trace was wanted, or none was written: a setting kept the run from beginning.
    """
    before = _state(trace)
    try:
        yield
    finally:
        if _state(trace) not in (None, before):
            print(f"moesaic: {said.format(trace)}", file=sys.stderr)


def _state(trace: str | None) -> tuple[int, int] | None:
    """When the file was written, and its bytes; None: there is nothing in it."""
    if trace is None or not Path(trace).is_file():
        return None
    found = Path(trace).stat()
    return (found.st_mtime_ns, found.st_size) if found.st_size else None
