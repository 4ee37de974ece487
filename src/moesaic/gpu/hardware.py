"""A CUDA device and the link to it. No real GPU has run this code yet. Its tests run it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from moesaic.planning.hardware.device import Copy, Device, Way
from moesaic.planning.hardware.timing import Show, Stopwatch


class Cuda:
    """The CUDA device that torch uses."""

    name = "cuda"

    @property
    def title(self) -> str:
        return torch.cuda.get_device_name()

    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def allocate_pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        torch.cuda.empty_cache()


def copies(device: Device, size: int, stopwatch: Stopwatch, show: Show) -> tuple[Copy, ...]:
    """Measure all kinds of copies, `size` bytes at a time. Staging uses as many threads as torch has."""
    device_memory = torch.ones(size, dtype=torch.uint8, device=device.name)
    pageable, pinned_memory = torch.ones(size, dtype=torch.uint8), device.allocate_pinned(size)
    pinned_memory.fill_(1)
    jobs: tuple[tuple[Way, bool, Callable[[], object]], ...] = (
        ("down", True, partial(device_memory.copy_, pinned_memory, non_blocking=True)),
        ("down", False, partial(device_memory.copy_, pageable)),
        ("up", True, partial(pinned_memory.copy_, device_memory, non_blocking=True)),
        ("up", False, partial(pageable.copy_, device_memory)),
        ("staging", True, partial(pinned_memory.copy_, pageable)),
    )
    measured_copies: list[Copy] = []
    for way, is_pinned, run in jobs:
        show("link", len(measured_copies), len(jobs))
        measured_copies.append(Copy(way, is_pinned, size / stopwatch.seconds(run)))
    show("link", len(jobs), len(jobs))
    return tuple(measured_copies)
