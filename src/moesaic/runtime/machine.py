"""What this machine offers to one process."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can be taken without swapping: what the kernel says, and a container's limit."""
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_left()
    return available if limit is None else min(available, limit)


def _cgroup_left() -> int | None:
    """Bytes left under the memory limit of this control group (version 2), if it has one."""
    limit, current = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not limit.is_file() or not current.is_file() or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(current.read_text()))
