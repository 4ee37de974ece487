"""Joins a cluster as an expert server and serves, until it is shut down or loses its connection."""

from __future__ import annotations

from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.experts.process import serve
from moesaic.joining import enlisting
from moesaic.joining.options import JoinOptions, OnJoined
from moesaic.transport.wakeup import Wakeup


def serve_once(joining: JoinOptions, secret: bytes, on_joined: OnJoined) -> int:
    """Join as an expert server and serve. Returns 0 once the cluster has sent Shutdown.

    on_joined: called with what the cluster answered.

    Raises ConfigError for settings that cannot work, and ConnectionLost for all else.
    """
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
