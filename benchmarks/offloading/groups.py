"""A process and its page cache under a limit of memory: a control group of Linux, version 1 or 2."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
FILES = {
    1: {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes", "kills": "memory.oom_control"},
    2: {"limit": "memory.max", "peak": "memory.peak", "kills": "memory.events"},
}
SWAP = {1: ("memory.memsw.limit_in_bytes", None), 2: ("memory.swap.max", "0")}
"""File, and what is written there; None: the limit of memory again. A kernel without swap may have none."""
PATIENCE = 5.0
"""Seconds for a group to become empty."""


class NoGroup(Exception):
    """Why no limit can be set, in one line."""


@dataclass(frozen=True)
class Group:
    """One control group with its limit."""

    path: Path
    version: int

    def entering(self, command: list[str]) -> list[str]:
        """The command as one that enters the group first, so that all it allocates is counted here."""
        script = 'echo $$ > "$1" && shift && exec "$@"'
        return ["/bin/sh", "-c", script, "sh", str(self.path / "cgroup.procs"), *command]

    def peak(self) -> int | None:
        """Most bytes that were charged at once, page cache included; None where the kernel does not say."""
        try:
            return int((self.path / FILES[self.version]["peak"]).read_text())
        except OSError:
            return None

    def killed(self) -> bool:
        """Whether the kernel ended a process because of the limit."""
        try:
            lines = (self.path / FILES[self.version]["kills"]).read_text().splitlines()
        except OSError:
            return False
        return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines if line)

    def remove(self) -> None:
        """Remove the group after its processes were ended. Waits a moment for those that are left."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def create(limit: int, name: str, mount: Path = MOUNT, own: Path = OWN) -> Group:
    """A group inside this process's own one, or beside it, so that outer limits go on to hold.

    limit: bytes. Raises NoGroup where none can be made.
    """
    version, places = candidates(mount, own)
    reason = "no memory controller is mounted"
    for place in places:
        try:
            return _create(place / name, version, limit)
        except OSError as error:
            reason = f"{error.filename or place}: {error.strerror}"
    raise NoGroup(f"no memory limit can be set here ({reason}); run as root, or with --no-limit")


def candidates(mount: Path, own: Path) -> tuple[int, list[Path]]:
    """The version of control groups, and where a new one may be tried.

    own: lines such as "4:memory:/user" of version 1, or "0::/user" of version 2.
    """
    groups = dict(_controllers(own.read_text()))
    if "memory" in groups and (mount / "memory").is_dir():
        root = mount / "memory"
        inside = root / groups["memory"].strip("/")
        return 1, [inside if inside.is_dir() else root]
    if "" in groups and (mount / "cgroup.controllers").is_file():
        inside = mount / groups[""].strip("/")
        inside = inside if inside.is_dir() else mount
        # Version 2 lets no group have processes and limited children; ours has this process.
        return 2, [inside] if inside == mount else [inside, inside.parent]
    return 0, []


def _controllers(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _create(path: Path, version: int, limit: int) -> Group:
    path.mkdir()
    try:
        _write(path / FILES[version]["limit"], str(limit))
        swap, value = SWAP[version]
        if (path / swap).exists():
            _write(path / swap, value or str(limit))
        if not os.access(path / "cgroup.procs", os.W_OK):
            raise PermissionError(13, "cannot be entered", str(path))
    except OSError:
        path.rmdir()
        raise
    return Group(path, version)


def _write(path: Path, text: str) -> None:
    with path.open("r+") as file:  # never creates one: in a group without a memory controller there is none
        file.write(text)
