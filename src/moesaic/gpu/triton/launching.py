"""What all Triton kernels share: blocks of a power of two, and the count of launches."""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs

IS_INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU: if TRITON_INTERPRET was 1 at the import."""


class Launches:
    """Counts launches. Tests hold a layer to its number."""

    count = 0


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on a grid of programs. An empty grid launches nothing."""
    if 0 in grid:
        return
    Launches.count += 1
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    if device.type != "cuda":
        run(kernel, grid, arguments, constants)
        return
    with torch.cuda.device(device):
        run(kernel, grid, arguments, constants)


def run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch on the current device. Tests put their device in its place."""
    kernel[grid](*arguments, **constants)


def block(numbers: int, least: int = 1) -> int:
    """The smallest power of two that is at least `numbers` and `least`.

    >>> block(576), block(3, least=16)
    (1024, 16)
    """
    return max(least, 1 << max(0, numbers - 1).bit_length())
