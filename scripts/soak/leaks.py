"""What this process holds of the system, before and after a cluster: both must be the same."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 3.0
"""Seconds in which threads and processes that are on their way out have to be gone."""

Holdings = dict[str, frozenset[str]]
"""Kind -> one entry for each."""


@dataclass(frozen=True)
class Leaks:
    """What was not given back, kind -> what."""

    found: dict[str, list[str]]

    def __bool__(self) -> bool:
        return any(self.found.values())


def holdings(folder: Path) -> Holdings:
    """folder: where temporary files of this process lie, and nobody else's."""
    gc.collect()
    maps = (SELF / "maps").read_text().splitlines()
    return {
        "processes": frozenset(_children()),
        "file descriptors": frozenset(_descriptors()),
        "threads": frozenset(f"{one.name} {one.ident}" for one in threading.enumerate()),
        "shared memory": frozenset(
            [line.split()[-1] + " " + line.split()[0] for line in maps if "memfd:moesaic" in line]
            + [str(path) for path in SHARED_MEMORY.glob("*moesaic*")]
        ),
        "temporary files": frozenset(str(path) for path in folder.rglob("*")),
    }


def difference(before: Holdings, after: Holdings) -> Leaks:
    """What only `after` has.

    Example: {"threads": {"a"}} and {"threads": {"a", "b"}} -> Leaks({"threads": ["b"]}).
    """
    return Leaks({kind: sorted(after[kind] - before[kind]) for kind in before})


def left_over(before: Holdings, folder: Path) -> Leaks:
    """Like `difference` with what there is now; looks again while it may still go away."""
    deadline = time.monotonic() + PATIENCE
    while (leaks := difference(before, holdings(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return leaks


def _children() -> list[str]:
    """Process ids, those that ended and nobody waited for too."""
    found = []
    for file in SELF.glob("task/*/children"):
        try:
            found += file.read_text().split()
        except OSError:
            pass  # the thread has just ended
    return found


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir(SELF / "fd"):  # noqa: PTH208 - reading the folder opens one that is gone then
        try:
            found.append(f"{name} {os.readlink(SELF / 'fd' / name)}")  # noqa: PTH115
        except OSError:
            pass
    return found
