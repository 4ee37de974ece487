"""Keeps the weights of a worker that joined in memory from one supervisor to the next."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from moesaic.core.job_membership import JobMembership
from moesaic.runtime.machine import trim_freed_memory
from moesaic.runtime.model_loading import LoadedModel

LOG = logging.getLogger(__name__)


class KeptModel:
    """What a worker that joined has loaded. It stays in memory when the supervisor is gone.

    Everything else of the worker is made anew, also its KV cache: its requests are gone with the supervisor.
    """

    def __init__(self) -> None:
        self.num_loads = 0
        """Models that were loaded."""
        self.membership = JobMembership()
        """The membership of this process in a job of GPUs."""
        self._model: LoadedModel | None = None
        self._settings: object = None
        """The settings and files that `_model` depends on."""

    @property
    def has_model(self) -> bool:
        """Whether a model is in memory."""
        return self._model is not None

    def get(self, settings: object, make: Callable[[], LoadedModel]) -> LoadedModel:
        """The model for these settings: the one that is there, or a new one by `make`.

        settings: the settings and files on which the model depends. The last worker's KV cache is gone before
        the next one is sized, and an old model before a new one is loaded.
        """
        if self.num_loads:
            self._model = self._model if self._settings == settings else None
            _free()
        if self._model is not None:
            LOG.info("the weights that were loaded before are still there")
            return self._model
        self._model, self._settings, self.num_loads = make(), settings, self.num_loads + 1
        return self._model

    def drop(self) -> None:
        """Free the model, for a worker that does not take it from here."""
        self._model = self._settings = None
        _free()


def _free() -> None:
    gc.collect()  # errors may still refer to the last worker
    trim_freed_memory()
    torch.cuda.empty_cache()  # does nothing where no GPU was used
