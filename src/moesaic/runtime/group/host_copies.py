"""From a rank's device to memory that the transport reads, and back. On a CPU nothing is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_host(rows: torch.Tensor) -> npt.NDArray[Any]:
    """The same numbers; those of a GPU when it has computed them."""
    array: npt.NDArray[Any] = rows.cpu().numpy()
    return array


def to_device(rows: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The same numbers."""
    return torch.from_numpy(rows).to(device)
