"""How many bytes a model takes, before it is loaded beside others and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.commands.model_settings import ServedModel
from moesaic.commands.starting import call_in_process
from moesaic.config import parse_bytes
from moesaic.runtime import quick_fit

SMALL_SHARE = 8
"""A model that certainly takes less than this part of the memory is not measured."""
PROCESS_BYTES = 600 << 20
"""Bytes of libraries and rows of a server with one worker."""


def measure(model: ServedModel, capacity: int) -> int:
    """Bytes that a model needs. capacity: bytes of memory for all models.

    Raises MoesaicError for a model that cannot be loaded. Downloads a model of a hub.
    """
    bound = quick_fit.bound_bytes(model.worker, model.cluster.resolve())
    fast_memory = model.offload.fast_memory
    if fast_memory is not None:
        return capacity if fast_memory == "auto" else parse_bytes("--fast-memory", fast_memory)
    if bound <= capacity // SMALL_SHARE:
        return bound
    # Headers are read with torch, which would stay in the memory of this process.
    return call_in_process(_measure, model, work="measures")


def count_loaded_bytes(model: ServedModel, info: Mapping[str, Any], need: int) -> int:
    """Bytes that a loaded model takes. info: what its server says of its worker. need: see `measure`."""
    cluster = model.cluster.resolve()
    caches = int(info["kv_bytes"]) + int(info["state_bytes"])
    if cluster.has_several_processes:
        return need + (cluster.attention_workers + cluster.prefill_workers) * caches
    if model.offload.fast_memory is not None:
        return need
    return int(info["weight_bytes"]) + caches + PROCESS_BYTES


def _measure(model: ServedModel) -> int:
    from moesaic.runtime import fitting

    return fitting.measure_bytes(model.worker, model.cluster)
