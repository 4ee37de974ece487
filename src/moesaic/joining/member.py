"""One life of a process in a cluster: it joins, serves, and leaves or is cut off."""

from __future__ import annotations

import os
from collections.abc import Callable

from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.joining import enlisting
from moesaic.joining.options import JoinOptions
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

OnJoined = Callable[[messages.Enlisted], None]


def server(joining: JoinOptions, secret: bytes, on_joined: OnJoined) -> int:
    """Join as an expert server and serve. Returns 0 once the cluster has sent Shutdown.

    on_joined: called with what the cluster answered.

    Raises ConfigError for settings that cannot work, and ConnectionLost for all else.
    """
    from moesaic.experts.process import serve

    wakeup = Wakeup()
    cluster, here = enlisting.connect(joining, secret, None, wakeup.ring)
    try:
        enlisted = enlisting.enlist(cluster, joining)
        on_joined(enlisted)
        config = enlisting.server_config(joining, enlisted, here)
        return serve(cluster, config, wakeup, secret)
    except ConfigError as error:
        cluster.send(messages.Failed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise type(lost)(f"{joining.cluster}: {lost}") from lost
    finally:
        cluster.close()
        wakeup.close()


def worker(joining: JoinOptions, secret: bytes, on_joined: OnJoined, on_lost: Callable[[str], None]) -> int:
    """Join as an attention worker or prefill worker and serve, like `server`.

    on_lost: called with the reason when the connection ends after that. The process ends then, even in the
    middle of a step.
    """
    wakeup = Wakeup()
    joined: list[StreamConnection] = []

    def end() -> None:
        if joined:
            on_lost(f"{joining.cluster}: the connection is lost")
            os._exit(1)

    cluster, here = enlisting.connect(joining, secret, end, wakeup.ring)
    try:
        enlisted = enlisting.enlist(cluster, joining)
        on_joined(enlisted)
        config = enlisting.worker_config(joining, enlisted, here)
        from moesaic.runtime.process import serve  # imports torch, which takes seconds

        joined.append(cluster)
        return serve(cluster, config, wakeup, enlisted.weights)
    except ConfigError as error:
        cluster.send(messages.Failed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise type(lost)(f"{joining.cluster}: {lost}") from lost
