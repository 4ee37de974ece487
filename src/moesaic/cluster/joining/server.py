"""Joins a cluster as an expert server and serves, until it is shut down or loses its connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions, OnJoined
from moesaic.core.errors import ConnectionLost
from moesaic.experts.keeping import KeptExperts
from moesaic.experts.process import serve
from moesaic.transport.wakeup import Wakeup


def serve_with_kept_experts() -> Callable[[JoinOptions, bytes, OnJoined], int]:
    """`serve_once` for one process: each call finds the experts that the last one has loaded."""
    return partial(serve_once, kept_experts=KeptExperts())


def serve_once(
    joining: JoinOptions, secret: bytes, on_joined: OnJoined, kept_experts: KeptExperts | None = None
) -> int:
    """Join as an expert server and serve. Returns 0 once the cluster has sent Shutdown.

    kept_experts: see `experts.process.serve`.

    Raises ConfigError for settings that cannot work, and ConnectionLost for all else.
    """
    wakeup = Wakeup()
    try:
        cluster, own_address = enlisting.connect(joining, secret, None, wakeup.ring)
    except ConnectionLost:
        wakeup.close()
        raise
    try:
        with enlisting.report_errors(cluster, joining):
            answer = enlisting.enlist(
                cluster, joining, None if kept_experts is None else kept_experts.resident_experts
            )
            on_joined(answer.model)
            config = enlisting.server_config(joining, answer, own_address)
            return serve(cluster, config, wakeup, secret, kept_experts)
    finally:
        cluster.close()
        wakeup.close()
