"""Joins a cluster as a worker and serves, in a process of its own. It imports torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from moesaic.joining import enlisting
from moesaic.joining.options import JoinOptions, OnJoined
from moesaic.runtime.process import serve
from moesaic.transport.wakeup import Wakeup


def serve_once(
    joining: JoinOptions, secret: bytes, on_joined: OnJoined, on_lost: Callable[[str], None]
) -> int:
    """Join as an attention worker or prefill worker and serve, like `server.serve_once`.

    on_lost: called with the reason when the connection ends after that. The process ends then, even in the
    middle of a step.
    """
    wakeup = Wakeup()
    serving = threading.Event()

    def end() -> None:
        if serving.is_set():
            on_lost(f"{joining.cluster}: the connection is lost")
            os._exit(1)

    cluster, here = enlisting.connect(joining, secret, end, wakeup.ring)
    with enlisting.told(cluster, joining):
        enlisted = enlisting.enlist(cluster, joining)
        on_joined(enlisted.model)
        config = enlisting.worker_config(joining, enlisted, here)
        serving.set()
        return serve(cluster, config, wakeup, enlisted.weights)
