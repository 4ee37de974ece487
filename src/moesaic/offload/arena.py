"""The fast level's memory if it is in this process: one mapping of fixed size that is handed out once."""

from __future__ import annotations

import torch

from moesaic.core.errors import ConfigError
from moesaic.models.pages import huge_pages
from moesaic.offload.reading import ALIGNMENT


class Arena:
    """Memory of `size` bytes, rounded down to pages. The system provides the pages when they are taken.

    >>> arena = Arena(3 * 4096)
    >>> first, second = arena.take(5000), arena.take(4096)
    >>> len(first), second.data_ptr() - first.data_ptr(), arena.used_bytes
    (5000, 8192, 12288)

    Raises ConfigError for a size below one page or beyond what the system can map.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        """Bytes handed out. Each portion is rounded up to pages."""
        if self.size <= 0:
            raise ConfigError.field("fast memory", size, f"at least {ALIGNMENT} bytes")
        try:
            self._memory = torch.frombuffer(huge_pages(self.size), dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            raise ConfigError.field("fast memory", size, f"what can be mapped ({error})") from error

    @property
    def free_bytes(self) -> int:
        """Bytes that `take` can still hand out."""
        return self.size - self.used_bytes

    def take(self, size: int) -> torch.Tensor:
        """Returns [size] uint8 zeros at a multiple of ALIGNMENT. They keep the arena's memory alive.

        This writes to each page once, because the first pass would otherwise wait for page faults: half a
        second for 270 MiB. Raises ConfigError and hands out nothing if fewer than `size` bytes are left.
        """
        begin, rounded_size = self.used_bytes, -(-size // ALIGNMENT) * ALIGNMENT
        if rounded_size > self.free_bytes:
            raise ConfigError.field("fast memory", begin + rounded_size, f"at most {self.size} bytes")
        self.used_bytes += rounded_size
        self._memory[begin : begin + rounded_size : ALIGNMENT] = 0
        return self._memory[begin : begin + size]
