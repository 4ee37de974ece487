"""Finds processes and their states from outside. Those that end meanwhile are left out."""

from __future__ import annotations

from pathlib import Path


def children(pid: int, module: str | None = None) -> list[int]:
    """Ids of the processes that the main thread of `pid` started. module: only those that run it as `python
    -m`, or as a fork of `forked_workers`."""
    return [int(child) for child in _started(Path(f"/proc/{pid}/task/{pid}")) if _runs(child, module)]


def all_children(pid: int, module: str | None = None) -> list[int]:
    """Ids of those that any thread of `pid` started. module: as above."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
    started = [child for task in tasks for child in _started(task)]
    return sorted(int(child) for child in started if _runs(child, module))


def gone(pid: int) -> bool:
    """Whether the process has ended, even if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _started(task: Path) -> list[str]:
    """Ids of the processes that a thread started. None if it has ended."""
    try:
        return (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs(pid: str, module: str | None) -> bool:
    """Whether the process runs `module`. Forks have the end of its name as theirs."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return module is None or module in command or name == module[-15:]
