"""The limits that control groups and the system set on the memory and the CPU time of this process.

A process is in one control group of version 2, or in one for each controller of version 1, or in both. Each
group above it limits it too. So the bound is the least limit of all of these, and of RLIMIT_AS for memory.
A container sees its own groups as the root of the tree, so it finds the limits that it may see.

Question: Which limits of a container does moesaic keep to, and how does it find them?
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_STATM, _VMSTAT = Path("/proc/self/statm"), Path("/proc/vmstat")
NO_LIMIT = 2**60
"""Bytes from which on a limit is none: version 1 has a number near 2^63 then."""


@dataclass(frozen=True)
class Limit:
    """A limit of memory in bytes, or of CPU time in cores."""

    amount: float
    source: str
    """Where it was found, in words for people."""
    left: float = 0.0
    """Bytes of memory below it that are free, or that have pages of files."""


@dataclass(frozen=True)
class _Group:
    """A control group of this process, or one above it."""

    folder: Path
    name: str
    version: int

    def read(self, file: str) -> str | None:
        """The contents of a file; None where the group has none, or it cannot be read."""
        try:
            return (self.folder / file).read_text().strip()
        except OSError:
            return None

    def read_number(self, file: str) -> int | None:
        """The number in a file; None where there is none, as in "max"."""
        text = self.read(file)
        return int(text) if text is not None and text.isdecimal() else None

    def read_field(self, file: str, name: str) -> int:
        """A number of a file with a name and a number in each line; 0 where there is none."""
        for line in (self.read(file) or "").splitlines():
            key, _, number = line.partition(" ")
            if key == name and number.isdecimal():
                return int(number)
        return 0

    def make_limit(self, amount: float, file: str, left: float = 0.0) -> Limit:
        return Limit(amount, f"{file} of the control group {self.name}", left)


def cpu_quota(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> Limit | None:
    """The least limit of CPU time, in cores. None without a limit."""
    limits = (_find_cpu_limit(group) for group in _list_groups("cpu", cgroups, own_groups))
    return min((limit for limit in limits if limit is not None), key=_amount, default=None)


def memory_limit(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> Limit | None:
    """The least limit of memory, in bytes. None without a limit."""
    return min(_list_memory_limits(cgroups, own_groups), key=_amount, default=None)


def tightest_memory_limit(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> Limit | None:
    """The limit of memory below which the fewest bytes are left. None without a limit."""
    return min(_list_memory_limits(cgroups, own_groups), key=lambda limit: limit.left, default=None)


def count_oom_kills(cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """How many processes of the group of this process the kernel has killed for want of memory.

    Outside of every group they are those of the machine.
    """
    for group in _list_groups("memory", cgroups, own_groups):
        file = "memory.events" if group.version == 2 else "memory.oom_control"
        if group.read(file) is not None:
            return group.read_field(file, "oom_kill")
    return _Group(_VMSTAT.parent, "", 2).read_field(_VMSTAT.name, "oom_kill")


def _amount(limit: Limit) -> float:
    return limit.amount


def _list_groups(controller: str, cgroups: Path, own_groups: Path) -> Iterator[_Group]:
    """The groups of this process that may limit what a controller is for, each before the one above it."""
    names = {"": "/", controller: "/"}  # controllers of version 1, or "" for version 2 -> name of the group
    with contextlib.suppress(OSError):
        for line in own_groups.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number == "0" or controller in controllers.split(","):
                names["" if number == "0" else controller] = name
    mounts = [(cgroups, "", 2), (cgroups / "unified", "", 2)]
    mounts += [(folder, controller, 1) for folder in _list_mounts(controller, cgroups)]
    for mount, key, version in mounts:
        for folder in _list_folders(mount, names[key]):
            yield _Group(folder, "/" + "/".join(folder.relative_to(mount).parts), version)


def _list_mounts(controller: str, cgroups: Path) -> list[Path]:
    """Where a controller of version 1 is mounted: alone, or with others as in "cpu,cpuacct"."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # a process that has no descriptors left asks, too
        folders = sorted(cgroups.iterdir())
    mounts = [folder for folder in folders if controller in folder.name.split(",")]
    return list({mount.resolve(): mount for mount in mounts}.values())


def _list_folders(mount: Path, name: str) -> list[Path]:
    """The folders of a group and of those above it, up to the mount.

    A container may see only a part of the tree, and not under the full name. Then the end of the name counts.
    """
    parts = [part for part in name.split("/") if part and part != ".."]
    ends = (
        [mount, *(mount.joinpath(*parts[first:length]) for length in range(first + 1, len(parts) + 1))]
        for first in range(len(parts) + 1)
    )
    return next(folders[::-1] for folders in ends if folders[-1].is_dir() or len(folders) == 1)


def _find_cpu_limit(group: _Group) -> Limit | None:
    if group.version == 2:
        file, (quota, period) = "cpu.max", [*(group.read("cpu.max") or "max 1").split(), "100000"][:2]
    else:
        file = "cpu.cfs_quota_us"
        quota, period = group.read(file) or "-1", group.read("cpu.cfs_period_us") or "100000"
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return group.make_limit(int(quota) / int(period), file)


def _list_memory_limits(cgroups: Path, own_groups: Path) -> list[Limit]:
    groups = _list_groups("memory", cgroups, own_groups)
    limits = [limit for group in groups for limit in _list_group_limits(group)]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        pages = int(_STATM.read_text().split()[0]) if _STATM.is_file() else 0
        left = address_space - pages * resource.getpagesize()
        limits.append(Limit(address_space, "RLIMIT_AS (ulimit -v)", max(0, left)))
    return limits


def _list_group_limits(group: _Group) -> Iterator[Limit]:
    """The limits of one group. Pages of files count as left, since the kernel drops them for others."""
    is_new = group.version == 2
    usage = group.read_number("memory.current" if is_new else "memory.usage_in_bytes") or 0
    kinds = ("inactive_file", "active_file") if is_new else ("total_inactive_file", "total_active_file")
    usage -= sum(group.read_field("memory.stat", kind) for kind in kinds)
    for file in ("memory.max", "memory.high") if is_new else ("memory.limit_in_bytes",):
        amount = group.read_number(file)
        if amount is not None and amount < NO_LIMIT:
            yield group.make_limit(amount, file, min(amount, max(0, amount - usage)))
