"""Finds processes and their states from outside."""

from __future__ import annotations

from pathlib import Path


def children(pid: int, module: str | None = None) -> list[int]:
    """Ids of the processes that the main thread of `pid` started. module: only those that run it as `python
    -m`, or as a fork of `forked_workers`."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in started if _runs(child, module)]


def all_children(pid: int, module: str | None = None) -> list[int]:
    """Ids of those that any thread of `pid` started. module: as above."""
    lists = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    started = [child for listed in lists for child in listed]
    return sorted(int(child) for child in started if _runs(child, module))


def gone(pid: int) -> bool:
    """Whether the process has ended, even if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _runs(pid: str, module: str | None) -> bool:
    """Whether the process runs `module`. Forks have the end of its name as theirs."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return module is None or module in command or name == module[-15:]
