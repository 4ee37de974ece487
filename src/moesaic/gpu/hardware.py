"""A CUDA device and the link to it. No real GPU has run this code yet. Its tests run it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch

from moesaic.planning.hardware.timing import Show, Stopwatch

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

    def pinned(self, size: int) -> torch.Tensor:
        """A uint8 tensor [size] of pinned host memory, which the device reads by itself."""
        ...

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        ...

    def release(self) -> None:
        """Free the memory that torch has cached and that nothing uses. A worker may need it next."""
        ...


class Cuda:
    """The CUDA device that torch uses."""

    name = "cuda"

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name()

    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        torch.cuda.empty_cache()


def find() -> Device | None:
    """The CUDA device that torch sees, or None."""
    return Cuda() if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Copy:
    """The measured speed of one kind of copy between host and device."""

    way: Way
    """"down": to the device. "up": from it. "staging": from ordinary host memory to pinned memory."""
    pinned: bool
    """True if the host's memory is pinned."""
    bandwidth: float
    """Measured bytes/s."""


def copies(device: Device, size: int, stopwatch: Stopwatch, show: Show) -> tuple[Copy, ...]:
    """Measure all kinds of copies, `size` bytes at a time. Staging uses as many threads as torch has."""
    there = torch.ones(size, dtype=torch.uint8, device=device.name)
    here, pinned = torch.ones(size, dtype=torch.uint8), device.pinned(size)
    pinned.fill_(1)
    jobs: tuple[tuple[Way, bool, Callable[[], object]], ...] = (
        ("down", True, partial(there.copy_, pinned, non_blocking=True)),
        ("down", False, partial(there.copy_, here)),
        ("up", True, partial(pinned.copy_, there, non_blocking=True)),
        ("up", False, partial(here.copy_, there)),
        ("staging", True, partial(pinned.copy_, here)),
    )
    found: list[Copy] = []
    for way, is_pinned, run in jobs:
        show("link", len(found), len(jobs))
        found.append(Copy(way, is_pinned, size / stopwatch.seconds(run)))
    show("link", len(jobs), len(jobs))
    return tuple(found)
