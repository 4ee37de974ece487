"""Joins a cluster as a worker and serves, in a process of its own. It imports torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions, OnJoined
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConnectionLost
from moesaic.runtime.keeping import KeptModel
from moesaic.runtime.process import serve
from moesaic.transport.wakeup import Wakeup

STEP_SECONDS = 10.0
"""Seconds that a worker has, after its connection has ended, to finish its step and stay. After that it
ends."""


def serve_once(
    joining: JoinOptions,
    secret: bytes,
    on_joined: OnJoined,
    on_lost: Callable[[str], None],
    kept_model: KeptModel | None = None,
) -> int:
    """Join as an attention worker or prefill worker and serve, like `joining.server.serve_once`.

    kept_model: has the weights that were loaded for the last cluster, and gets those of this one. None:
    nothing of a worker is kept. on_lost: called with the reason when the connection ends and nothing can be
    kept. The process ends then, even in the middle of a step. That is so while it loads, and when a step
    takes longer than STEP_SECONDS.
    """
    wakeup = Wakeup()
    serving, left_cluster = threading.Event(), threading.Event()
    reusable_model: KeptModel | None = None

    def on_connection_end() -> None:
        # Before it serves, and once it has left, the main thread itself raises ConnectionLost.
        if not serving.is_set() or left_cluster.is_set():
            return
        # A worker with loaded weights may finish its step, keep them and join again.
        can_stay = reusable_model is not None and reusable_model.has_model
        if can_stay and left_cluster.wait(STEP_SECONDS):
            return
        on_lost(f"{joining.cluster}: the connection is lost")
        os._exit(1)

    try:
        cluster, own_address = enlisting.connect(joining, secret, on_connection_end, wakeup.ring)
    except ConnectionLost:
        wakeup.close()
        raise
    try:
        with enlisting.report_errors(cluster, joining):
            answer = enlisting.enlist(cluster, joining)
            on_joined(answer.model)
            config = enlisting.worker_config(joining, answer, own_address)
            reusable_model = kept_model if _can_stay(config) else None
            if kept_model is not None and reusable_model is None:
                kept_model.drop()
            serving.set()
            return serve(cluster, config, wakeup, answer.weights, reusable_model)
    except ConnectionLost:
        left_cluster.set()  # before closing, which wakes the thread that calls `end`
        cluster.close()
        wakeup.close()
        raise


def _can_stay(config: WorkerConfig) -> bool:
    """Whether the weights of such a worker can be kept: it has no other ranks, no weights that move between
    memories, and no modelled device."""
    return config.parallel.tensor_parallel_size == 1 and config.offload is None and config.paced is None
