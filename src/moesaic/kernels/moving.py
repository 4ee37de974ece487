"""Small arrays from the host to a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def moved(array: npt.NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """The array as a tensor on a device.

    To a GPU it goes by way of pinned memory, so the host does not wait until the GPU is done with what came
    before. On a CPU it is a view where the array is dense.
    """
    here = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return here.to(device)
    pinned = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
    return pinned.copy_(here).to(device, non_blocking=True)
