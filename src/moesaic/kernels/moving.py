"""Small tensors between the host and a device, through pinned memory.

Question: Where does the host wait for a GPU?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def move_array(array: npt.NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """The array as a tensor on a device.

    To a GPU it goes by way of pinned memory, so the host does not wait until the GPU is done with what came
    before. On a CPU it is a view where the array is dense.
    """
    if torch.device(device).type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    writable = np.require(array, requirements=["C", "W"])  # torch warns of others
    return pin_tensor(torch.from_numpy(writable)).to(device, non_blocking=True)


def move_tensor(answer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, without waiting for it."""
    if answer.device.type == "cpu" and device.type == "cuda":
        return pin_tensor(answer).to(device, non_blocking=True)
    return answer.to(device)


def pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor in pinned memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def to_host_arrays(tensors: Sequence[torch.Tensor | None]) -> list[npt.NDArray[Any] | None]:
    """The tensors of one device as dense arrays of the host. For a GPU it waits once, for all of them."""
    present = [tensor for tensor in tensors if tensor is not None]
    if all(tensor.device.type == "cpu" for tensor in present):
        return [None if tensor is None else tensor.contiguous().numpy() for tensor in tensors]
    copies: list[torch.Tensor | None] = []
    for tensor in tensors:
        copy = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(None if copy is None or tensor is None else copy.copy_(tensor, non_blocking=True))
    torch.cuda.current_stream(present[0].device).synchronize()
    return [None if tensor is None else tensor.numpy() for tensor in copies]
