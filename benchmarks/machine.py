"""What `peers.py` asks the machine: how much memory a process took at most."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def peak_bytes(process: int) -> int:
    """The most memory that a process and those it started had resident, each at its own worst moment."""
    return sum(_high_water_mark(PROC / str(one)) for one in _family(process))


def _family(process: int) -> Iterable[int]:
    yield process
    for children in PROC.glob(f"{process}/task/*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _high_water_mark(process: Path) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0  # it has just ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
