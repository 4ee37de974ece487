"""What is known of NVSHMEM without loading it: whether it is installed, and whether this process has used it.

This imports neither NVIDIA's bindings nor torch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from moesaic.core.errors import ConfigError

MODULE = "nvshmem"
INSTALL = "pip install nvshmem4py-cu12, or nvshmem4py-cu13 for CUDA 13"


def check_installed() -> None:
    """Raises ConfigError if nvshmem4py is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        allowed = f"auto, shm, socket, nixl (nvshmem4py is not installed: {INSTALL})"
        raise ConfigError.field("--transport", "nvshmem", allowed)


@dataclass
class Membership:
    """Of a process in a job. It can be in one job only, also where it joins another cluster later."""

    told: bool = False
    """Whether it was told to join one."""
