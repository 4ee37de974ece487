"""The cores and the memory that this machine offers to one process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from moesaic.runtime.limits import cpu_quota, memory_limit, tightest_memory_limit

_MEMINFO = Path("/proc/meminfo")
NVIDIA = Path("/dev/nvidiactl")
"""Exists where an NVIDIA driver is loaded."""


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
    """The number of cores that this process may run on, within the limit of CPU time."""
    return limit_cores(len(allowed_cpus()))


def limit_cores(count: int) -> int:
    """The number of these cores that may compute all the time, by the limit of CPU time: at least one.

    More threads would be paused in every step.
    """
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, int(quota.amount)))


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
    """Bytes that can be allocated without swapping, within the limits of `limits.memory_limit`."""
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available, limit = int(fields["MemAvailable"].split()[0]) * 1024, tightest_memory_limit()
    return available if limit is None else min(available, int(limit.left))


def total_memory() -> int:
    """Bytes of memory that processes may use."""
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return total if limit is None else min(total, int(limit.amount))


def describe_total_memory() -> str:
    """What sets `total_memory`, in words for people."""
    limit = memory_limit()
    return "the memory of this machine" if limit is None or limit.amount > total_memory() else limit.source
