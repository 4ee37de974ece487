"""The life of an attention worker's process: loading, serving, the end.

Question: How does the process of an attention worker start and end?
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from moesaic.config import WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.worker_info import WorkerInfo
from moesaic.models import files, fingerprint
from moesaic.models.checkpoint import Progress
from moesaic.models.served_files import watch_files
from moesaic.runtime import out_of_memory
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.keeping import KeptModel
from moesaic.runtime.model_loading import maps_files
from moesaic.runtime.worker import Worker
from moesaic.transport.stream import StreamConnection, end_process
from moesaic.transport.wakeup import Wakeup

ALIVE_SECONDS = 0.2
"""Seconds between two Alive messages."""


def serve(
    connection: StreamConnection,
    config: WorkerConfig,
    wakeup: Wakeup,
    weights: str = "",
    kept_model: KeptModel | None = None,
    last_acts: list[Callable[[], None]] | None = None,
) -> int:
    """Serve until the other end of the connection sends Shutdown. Returns the exit code.

    wakeup: rung at each message. weights: fingerprint of the checkpoint, for a worker that joined.
    kept_model: has the weights that were loaded for the last supervisor, and gets those of this one. Then
    nothing else of the worker is left when this raises ConnectionLost. None: the process ends then.
    last_acts: gets what is to be done before the process ends because the other end is gone.

    Raises ConnectionLost when the other end is gone, and ConfigError for what the user has to change.
    """
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)

    def end(reason: str) -> None:
        """End this process because another rank of its group ended. An idle group would not notice."""
        logging.warning("%s; this worker ends too", reason)
        with contextlib.suppress(ConnectionLost):
            if not config.supervised:
                connection.send(messages.WorkerFailed(reason, user_error=False))
        os._exit(1)

    parts, model = (config, connection, time.monotonic, _make_progress(connection)), kept_model or KeptModel()
    context = WorkerContext(*parts, wakeup=wakeup, on_rank_lost=end, kept_model=model)
    worker, info = _build(context, kept_model is not None)
    if last_acts is not None:
        last_acts.append(worker.store_prefixes)
    try:
        with _watch_files(config, connection):
            decodes = config.kv_role != "prefill"  # a job of GPUs is for steps of next tokens
            connection.send(messages.Ready(info, weights, worker.job_id if decodes else b""))
            if config.supervised:
                threading.Thread(target=_send_alive, args=(connection,), name="alive", daemon=True).start()
            worker.run()
    except ConnectionLost as error:
        if kept_model is not None:
            worker.close()
        if not config.supervised:  # a supervisor starts another worker; otherwise the user needs the reason
            connection.send(messages.WorkerFailed(str(error), user_error=False))
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory.describe_step_error(error)) from error
    return 0


def _build(context: WorkerContext, keeps_model: bool) -> tuple[Worker, WorkerInfo]:
    """The worker. Raises ConfigError, or ConnectionLost if the model is kept for the next supervisor."""
    try:
        return build_worker(context)
    except ConnectionLost as error:
        if keeps_model:
            raise
        raise ConfigError(str(error)) from error  # such as that of a rank that could not be started


def _watch_files(
    config: WorkerConfig, connection: StreamConnection
) -> contextlib.AbstractContextManager[None]:
    """Ends this process when somebody writes to a file that it computes from.

    The other ranks of this host have the same files, and end with it.
    """
    if config.offload is None and not maps_files(config.model):
        return contextlib.nullcontext()
    path = files.resolve(*config.model.source)
    stamp = config.checkpoint_stamp or fingerprint.stamp(path)
    return watch_files(path, stamp, partial(end_process, connection))


def _make_progress(connection: StreamConnection) -> Progress:
    """Tells the engine how much is loaded, now and then."""
    sent_at = 0.0

    def progress(done_bytes: int, total: int) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if now - sent_at > 0.2 or done_bytes == total:
            sent_at = now
            connection.send(messages.Loading(done_bytes, total))

    return progress


def _send_alive(connection: StreamConnection) -> None:
    """Report that this process is alive, from a thread of its own since a step may take long."""
    with contextlib.suppress(ConnectionLost):  # the thread that reads the connection ends this process
        while True:
            connection.send(messages.Alive())
            time.sleep(ALIVE_SECONDS)
