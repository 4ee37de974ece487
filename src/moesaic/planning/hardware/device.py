"""A device beside the CPU: what its measurement asks of it, and the speed of the link to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from moesaic.core import gpu_parts

Way = Literal["down", "up", "staging"]


class Device(Protocol):
    """A device: a processor with its own memory."""

    @property
    def name(self) -> str:
        """The device's name in torch."""
        ...

    @property
    def title(self) -> str:
        """The device's name for people."""
        ...

    def free(self) -> int:
        """Free bytes of its memory."""
        ...

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """A uint8 tensor [size] of pinned host memory, which the device reads by itself."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        ...

    def release(self) -> None:
        """Free the memory that torch has cached and that nothing uses. A worker may need it next."""
        ...


@dataclass(frozen=True)
class Copy:
    """The measured speed of one kind of copy between host and device."""

    way: Way
    """"down": to the device. "up": from it. "staging": from ordinary host memory to pinned memory."""
    is_pinned: bool
    """True if the host's memory is pinned."""
    bandwidth: float
    """Measured bytes/s."""


def find_device() -> Device | None:
    """The GPU that torch sees, or None."""
    return gpu_parts.cuda_device() if torch.cuda.is_available() else None
