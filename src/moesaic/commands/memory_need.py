"""How many bytes a model takes, before it is loaded beside others and after."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection as PipeConnection
from typing import Any

from moesaic.commands.model_settings import ServedModel
from moesaic.config import parse_bytes
from moesaic.core.errors import EngineDeadError, MoesaicError
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
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(sender, model), daemon=True)
    child.start()
    sender.close()
    try:
        result: int | MoesaicError = receiver.recv()
    except EOFError as error:
        child.join()
        raise EngineDeadError(f"the process that measures ended with code {child.exitcode}") from error
    child.join()
    if isinstance(result, MoesaicError):
        raise result
    return result


def count_loaded_bytes(model: ServedModel, info: Mapping[str, Any], need: int) -> int:
    """Bytes that a loaded model takes. info: what its server says of its worker. need: see `measure`."""
    cluster = model.cluster.resolve()
    caches = int(info["kv_bytes"]) + int(info["state_bytes"])
    if cluster.has_several_processes:
        return need + (cluster.attention_workers + cluster.prefill_workers) * caches
    if model.offload.fast_memory is not None:
        return need
    return int(info["weight_bytes"]) + caches + PROCESS_BYTES


def _measure(pipe: PipeConnection, model: ServedModel) -> None:
    with suppress(KeyboardInterrupt, BrokenPipeError):
        from moesaic.runtime import fitting

        try:
            pipe.send(fitting.measure_bytes(model.worker, model.cluster))
        except MoesaicError as error:
            pipe.send(error)
