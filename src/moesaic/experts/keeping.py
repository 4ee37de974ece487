"""Keeps the experts of a server in memory from one supervisor to the next.

Question: What does an expert server keep when its cluster is gone?
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from moesaic.config import ExpertServerConfig
from moesaic.core.job_membership import JobMembership
from moesaic.core.metrics import ResidencyStats
from moesaic.experts.backend import ExpertBackend

LOG = logging.getLogger(__name__)

BackendAndStats = tuple[ExpertBackend, Callable[[], ResidencyStats]]
"""A backend, and what is counted of its experts."""


class KeptExperts:
    """What a server that joined has loaded. It stays in memory when the supervisor is gone."""

    def __init__(self) -> None:
        self.num_loads = 0
        """Backends that were made, each of which loads its experts."""
        self.membership = JobMembership()
        """The membership of this process in a job of GPUs."""
        self._kept_backend: BackendAndStats | None = None
        self._settings: object = None
        """The settings and files that `_kept_backend` depends on."""

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        """Layer -> the experts that are in memory."""
        return {} if self._kept_backend is None else self._kept_backend[0].resident_experts

    def get(
        self, config: ExpertServerConfig, stamp: str, make: Callable[[ExpertServerConfig], BackendAndStats]
    ) -> BackendAndStats:
        """The backend for these settings: the one that is there, or a new one by `make`.

        stamp: of the checkpoint's files. The old backend is gone before a new one loads anything.
        """
        settings = (
            *(config.model, config.layout, config.kernels, config.mmap, config.fast_memory),
            *(config.device, config.threads, stamp),
        )
        if self._kept_backend is not None and self._settings == settings:
            LOG.info("the experts that were loaded before are still there")
            return self._kept_backend
        self._kept_backend = None
        gc.collect()  # errors may still refer to the work with the last supervisor
        self._settings, self.num_loads = settings, self.num_loads + 1
        self._kept_backend = make(config)
        return self._kept_backend
