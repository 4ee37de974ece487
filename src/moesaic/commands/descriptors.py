"""File descriptors of the process: their limit, and standard streams that are closed.

The limit is raised as far as it goes, and checked before anything needs a descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from pathlib import Path

from moesaic.core.errors import ConfigError
from moesaic.policy.fleet.bounds import FIRST_PROCESS_FILES, MORE_PROCESS_FILES

EXHAUSTED_ERRNOS = (errno.EMFILE, errno.ENFILE)


def prepare(processes: int = 1) -> None:
    """Raise the soft limit of this process and of its children to the hard one.

    processes: number of processes that this one starts. Raises ConfigError if even the hard limit is too
    small for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS names no hard limit, but has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_needed = FIRST_PROCESS_FILES + MORE_PROCESS_FILES * (processes - 1)
    if limit != resource.RLIM_INFINITY and limit < num_needed:
        raise ConfigError.field(
            "the limit of open files (ulimit -n)",
            limit,
            f"at least {num_needed}; raise it with ulimit -n 1024",
        )


def describe_exhaustion() -> str:
    """The line for a process that has run out of descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"too many open files; the limit of this process is {limit}: raise it with ulimit -n"


def replace_closed_streams() -> None:
    """Replace standard streams that were closed at the start, as by `>&-`.

    Otherwise a socket could get stdout's file number. Libraries also expect a file.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            replace_stream(name)


def replace_stream(name: str) -> None:
    """Replace stream `name` by a file that discards everything."""
    setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open until the end
