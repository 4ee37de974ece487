"""Joins a cluster with the ranks of this host, which share an attention worker with those of other hosts.

It imports torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions, OnJoined
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.runtime.group.build_rank import follow
from moesaic.transport.authentication import RefusedByCluster
from moesaic.transport.stream import StreamConnection

LAST_WORD_SECONDS = 10.0
"""Seconds that the cluster has, after the end of the group, to say whether it ends too."""


def serve_once(
    joining: JoinOptions, secret: bytes, on_joined: OnJoined, on_lost: Callable[[str], None]
) -> int:
    """Join, wait for a group and compute as its ranks, like `joining.server.serve_once`.

    on_lost: called with the reason when the connection or the group ends after that. The process ends then,
    even in the middle of a step.
    """
    following = threading.Event()

    def on_connection_end() -> None:
        if following.is_set():
            fail("the connection is lost")

    def fail(end_reason: str) -> None:
        on_lost(f"{joining.cluster}: {end_reason}")
        os._exit(1)

    def on_message() -> None:
        if following.is_set():
            _leave_if_asked(cluster)

    cluster, own_address = enlisting.connect(joining, secret, on_connection_end, on_message)
    with enlisting.report_errors(cluster, joining):
        answer = enlisting.enlist(cluster, joining)
        on_joined(answer.model)
        config = enlisting.worker_config(joining, answer, own_address)
        cluster.send(messages.RanksWait(answer.weights))
        meeting = cluster.receive(None)
        match meeting:
            case messages.Shutdown():
                return 0
            case messages.Refuse(reason):
                raise RefusedByCluster(f"refused this process: {reason}")
            case messages.RanksMeet():
                pass
            case _:
                raise ConnectionLost(f"it sent {type(meeting).__name__}, not where the ranks meet")
        following.set()
        _leave_if_asked(cluster)
        try:
            follow(config, meeting, fail)
        except ConnectionLost:
            cluster.wait_for_end(
                LAST_WORD_SECONDS
            )  # a shutdown or the end of the connection ends this process
            raise
    return 0


def _leave_if_asked(cluster: StreamConnection) -> None:
    """End this process, even in the middle of a step, if the cluster has sent Shutdown."""
    try:
        while (word := cluster.receive(0)) is not None:
            if isinstance(word, messages.Shutdown):
                os._exit(0)
    except ConnectionLost:
        pass  # the thread that reads ends this process
