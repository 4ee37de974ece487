"""What `peers.py` asks the machine: how fast memory can be read, and what a process took of it at most."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
SIZE = 1 << 30
"""Bytes that a test reads, far more than any cache holds."""
READS = 6


class ReadTest:
    """Several threads read memory with libc's memcmp, which does nothing else.

    Each compares two parts: a core reads two streams faster than one.
    """

    def __init__(self, threads: int) -> None:
        self._threads, self._length = threads, SIZE // (2 * threads)
        self._memory = b"\1" * SIZE
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def gb_per_s(self) -> float:
        """The best of some reads: what the machine has to give in this second."""
        return max(SIZE / self._read() / 1e9 for _ in range(READS))

    def _read(self) -> float:
        """Seconds that one pass over the memory takes."""
        start = ctypes.cast(ctypes.c_char_p(self._memory), ctypes.c_void_p).value or 0
        parts = [start + part * self._length for part in range(2 * self._threads)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        threads = [threading.Thread(target=self._memcmp, args=(*pair, self._length)) for pair in pairs]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started


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
