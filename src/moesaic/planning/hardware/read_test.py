"""How fast a machine's memory can be read at all, measured without the engine's kernels."""

from __future__ import annotations

import ctypes
import threading
import time

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
        start_time = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_time
