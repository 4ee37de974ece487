"""What this process holds of the system, before and after a cluster: both must be the same.

And what each process of a cluster holds, before the faults and once they are healed: no more than before,
since every worker has one connection to each server then, and what earlier ones had is gone.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
SHARED_MEMORY = Path("/dev/shm")
SEGMENT = "memfd:moesaic"
PATIENCE = 3.0
"""Seconds in which ending threads and processes have to be gone."""
LONG_PATIENCE = 15.0
"""Seconds after which an attempted connection to a frozen process has to be given up."""
RANK = "c.runtime.group"
"""The name of a forked rank. One whose worker was killed while this process adopted a fork became a child of
this process, which nobody waits for (`tests.support.forked_workers`)."""

Holdings = dict[str, frozenset[str]]
"""Kind -> one entry for each held object."""


@dataclass(frozen=True)
class Leaks:
    """What was not given back: kind -> the objects."""

    found: dict[str, list[str]]

    def __bool__(self) -> bool:
        return any(self.found.values())


def holdings(folder: Path) -> Holdings:
    """What this process holds. folder: contains temporary files of this process and of no other."""
    gc.collect()
    maps = (SELF / "maps").read_text().splitlines()
    return {
        "processes": frozenset(_children()),
        "file descriptors": frozenset(" ".join(one) for one in _descriptors(SELF / "fd")),
        "threads": frozenset(f"{one.name} {one.ident}" for one in threading.enumerate()),
        "shared memory": frozenset(
            [line.split()[-1] + " " + line.split()[0] for line in maps if SEGMENT in line]
            + [str(path) for path in SHARED_MEMORY.glob("*moesaic*")]
        ),
        "temporary files": frozenset(str(path) for path in folder.rglob("*")),
    }


def difference(before: Holdings, after: Holdings) -> Leaks:
    """What only `after` holds.

    Example: {"threads": {"a"}} and {"threads": {"a", "b"}} -> Leaks({"threads": ["b"]}).
    """
    return Leaks({kind: sorted(after[kind] - before[kind]) for kind in before})


def left_over(before: Holdings, folder: Path) -> Leaks:
    """As `difference`, with what is held now. Looks again for a while, since some of it may still go away."""
    deadline = time.monotonic() + PATIENCE
    while (leaks := difference(before, holdings(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return leaks


def held_by(process: Path) -> Counter[str]:
    """Sockets that a process has open, and segments that it has open or mapped. process: /proc/PID.

    Example: three sockets and one segment, which is mapped -> {"sockets": 3, "segments": 1}.
    """
    found: Counter[str] = Counter(segments=0, sockets=0)
    try:
        lines = (process / "maps").read_text().splitlines()
        open_now = _descriptors(process / "fd")
        segments = {(process / "fd" / name).stat().st_ino for name, target in open_now if SEGMENT in target}
    except OSError:
        return found  # it has just ended
    segments |= {int(line.split()[4]) for line in lines if SEGMENT in line}
    found["sockets"] = sum(target.startswith("socket:") for _, target in open_now)
    found["segments"] = len(segments)
    return found


def grown(before: Mapping[str, Counter[str]], after: Mapping[str, Counter[str]]) -> Leaks:
    """What processes have more of, by name; those that were not there before are not asked.

    Example: {"worker 0": {"sockets": 3}} and {"worker 0": {"sockets": 5}} -> Leaks({"sockets of processes":
    ["worker 0: 5, 3 before"]}).
    """
    found: dict[str, list[str]] = {}
    for name, counts in before.items():
        for kind, count in counts.items():
            more = after.get(name, counts)[kind]
            lines = found.setdefault(f"{kind} of processes", [])
            if more > count:
                lines.append(f"{name}: {more}, {count} before")
    return Leaks(found)


def growth(before: Mapping[str, Counter[str]], now: Callable[[], Mapping[str, Counter[str]]]) -> Leaks:
    """As `grown`, with what is held now. Looks again for a while, since some of it may still go away."""
    deadline = time.monotonic() + LONG_PATIENCE
    while (leaks := grown(before, now())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return leaks


def _children() -> list[str]:
    """The ids and names of child processes, including ended ones that nobody has waited for."""
    found = []
    for file in SELF.glob("task/*/children"):
        try:
            children = [(pid, *_name_and_state(pid)) for pid in file.read_text().split()]
        except OSError:
            continue  # the thread or the process has just ended
        for pid, name, state in children:
            if state == "Z" and name == RANK:
                os.waitpid(int(pid), os.WNOHANG)
            else:
                found.append(f"{pid} {name}")
    return found


def _name_and_state(pid: str) -> tuple[str, str]:
    """Example: "1234" -> ("moesaic.experts", "S"). Z: it has ended."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    return name, rest.split()[0]


def _descriptors(folder: Path) -> list[tuple[str, str]]:
    """The number and the target of each open file descriptor."""
    found = []
    for name in os.listdir(folder):  # noqa: PTH208 - reading the folder opens one that is gone then
        try:
            found.append((name, os.readlink(folder / name)))  # noqa: PTH115
        except OSError:
            pass
    return found
