"""Whether NVSHMEM is installed, without loading it.

This imports neither NVIDIA's bindings nor torch.
"""

from __future__ import annotations

import importlib.util

from moesaic.core.errors import ConfigError

MODULE = "nvshmem"
INSTALL = "pip install nvshmem4py-cu12, or nvshmem4py-cu13 for CUDA 13"


def check_installed() -> None:
    """Raises ConfigError if nvshmem4py is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        allowed_values = f"auto, shm, socket, nixl (nvshmem4py is not installed: {INSTALL})"
        raise ConfigError.field("--transport", "nvshmem", allowed_values)
