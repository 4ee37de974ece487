"""The fast level's memory where it is this process's own: one mapping, handed out once, that never grows."""

from __future__ import annotations

import torch

from moesaic.core.errors import ConfigError
from moesaic.models.pages import huge_pages
from moesaic.offload.reading import ALIGNMENT


class Arena:
    """`size` bytes, rounded down to pages; the machine gives them when they are taken.

    >>> arena = Arena(3 * 4096)
    >>> first, second = arena.take(5000), arena.take(4096)
    >>> len(first), second.data_ptr() - first.data_ptr(), arena.used
    (5000, 8192, 12288)

    Raises ConfigError for a size below one page or beyond what the machine can map.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used = 0
        """Bytes handed out, each portion rounded up to pages."""
        if self.size <= 0:
            raise ConfigError.field("fast memory", size, f"at least {ALIGNMENT} bytes")
        try:
            self._memory = torch.frombuffer(huge_pages(self.size), dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            raise ConfigError.field("fast memory", size, f"what can be mapped ({error})") from error

    @property
    def left(self) -> int:
        """Bytes that `take` can still hand out."""
        return self.size - self.used

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8, at a multiple of ALIGNMENT, zeros at first. It keeps the arena's memory alive.

        Each page is written once: the first pass would wait for them otherwise, half a second of 270 MiB.
        Raises ConfigError when no more than `left` bytes are there, and hands out nothing then.
        """
        begin, rounded = self.used, -(-size // ALIGNMENT) * ALIGNMENT
        if rounded > self.left:
            raise ConfigError.field("fast memory", begin + rounded, f"at most {self.size} bytes")
        self.used += rounded
        self._memory[begin : begin + rounded : ALIGNMENT] = 0
        return self._memory[begin : begin + size]
