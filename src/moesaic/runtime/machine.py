"""The cores and the memory that this machine offers to one process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
NVIDIA = Path("/dev/nvidiactl")
"""Exists where an NVIDIA driver is loaded."""
_CGROUP = Path("/sys/fs/cgroup")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep up to 2 GiB of freed memory for the next step.

    Every step allocates the same megabytes. To page them in again took a sixth of the time of a long prefill.
    Only glibc can do this; with another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**25)


def return_freed_memory() -> None:
    """Let the C library return each large block to the system as it is freed.

    Kept blocks fragment: they took 80 MiB more at a limit of 600 MiB. `Kernels.reuse_memory` keeps what a
    pass can use again. Only glibc can do this; with another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**17)


def trim_freed_memory() -> None:
    """Return the memory to the system that the C library has kept. Only glibc can do this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cores() -> int:
    """The number of cores that this process may run on."""
    return len(allowed_cpus())


def allowed_cpus() -> list[int]:
    """The numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def stay_on(cpus: Iterable[int]) -> None:
    """Keep the calling thread on these cores. Systems without sched_setaffinity ignore it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def available_memory() -> int:
    """Bytes that can be allocated without swapping, within the memory limit of a container."""
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_left()
    return available if limit is None else min(available, limit)


def total_memory() -> int:
    """Bytes of memory that this machine has, within the memory limit of a container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def _cgroup_left() -> int | None:
    """Bytes left below the memory limit of this control group (version 2), or None without a limit.

    Pages of files count as left, as in MemAvailable, since the kernel drops them when memory is needed.
    """
    limit, current = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if not limit.is_file() or not current.is_file() or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(current.read_text()) + _cgroup_file_pages())


def _cgroup_file_pages() -> int:
    """Bytes of files that this control group has in memory, without shared memory."""
    stat = _CGROUP / "memory.stat"
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
