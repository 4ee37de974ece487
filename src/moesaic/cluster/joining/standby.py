"""Watches the `moesaic serve` of another host, and returns when that one is gone.

The connection is like that of a process which joins: both ends prove that they know the secret, and both send
signs of life. Nobody else is asked. So a standby that is cut off from the first host takes over, too. That
costs no token, since each process belongs to the one `serve` that it is connected to.

Question: Who takes over when the host of `serve` dies (`--standby-for`)?
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from moesaic.cluster.joining import enlisting
from moesaic.cluster.joining.options import JoinOptions
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.models import fingerprint
from moesaic.policy.fleet.silence import RULE
from moesaic.transport import address as addresses
from moesaic.transport.authentication import PeerRefused
from moesaic.transport.host import this_host
from moesaic.transport.stream import StreamConnection

AGAIN_SECONDS = 1.0
"""Seconds between two attempts to reach a first host that was not seen yet."""
FIRST_WORD_SECONDS = 10.0


def prepare(address: str, own_address: str, model: Path) -> str:
    """The fingerprint of the checkpoint here.

    address: of the cluster to watch. own_address: at which processes will join this host. Raises ConfigError
    for addresses that cannot be used, so that this does not fail when it is time to take over.
    """
    addresses.parse(address)
    with contextlib.closing(addresses.bind(addresses.parse(own_address))[0]):
        return fingerprint.compute_fingerprint(model)


def watch(
    address: str,
    secret: bytes,
    weights: str,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns once the cluster at `address`, which was there before, is gone without a word.

    It waits for one that is not there yet, and for one that was shut down on purpose. weights: fingerprint of
    the checkpoint here. say: called with each change, in words for people. Raises ConfigError if the cluster
    serves another checkpoint, and PeerRefused if it has another secret or version. A refusal is not
    authenticated, so after the cluster was seen it counts as gone.
    """
    joining, has_seen_cluster = JoinOptions(address, "standby"), False
    say(f"standing by for {address}")
    while True:
        try:
            connection, _ = enlisting.connect(joining, secret, None, lambda: None, enlisting.DIAL_SECONDS)
        except ConnectionLost as lost:
            if isinstance(lost, PeerRefused) and not has_seen_cluster:
                raise
            if has_seen_cluster:
                say(f"{lost}: taking over")
                return
            sleep(AGAIN_SECONDS)
            continue
        with contextlib.closing(connection):
            if not _is_the_cluster(connection, address, weights):
                sleep(AGAIN_SECONDS)
                continue
            if not has_seen_cluster:
                say(f"watching {address}")
            has_seen_cluster = True
            end_reason = _end(connection)
            if end_reason is None:
                has_seen_cluster = False
                say(f"{address} was shut down: waiting for it")
            # Otherwise the next attempt to connect shows whether the host is gone.
            elif connection.silence >= RULE.lost_supervisor:
                say(f"{address}: {end_reason}: taking over")
                return


def _is_the_cluster(connection: StreamConnection, address: str, weights: str) -> bool:
    """Introduces this standby. Returns False if the connection ends before the answer."""
    with contextlib.suppress(ConnectionLost):
        connection.send(messages.Enlist("standby", host=this_host()))
        answer = connection.receive(FIRST_WORD_SECONDS)
        if isinstance(answer, messages.EnlistReply):
            difference = fingerprint.difference(weights, answer.weights)
            if difference:
                requirement = f"a cluster with the checkpoint of this host; that one has other {difference}"
                raise ConfigError.field("--standby-for", address, requirement)
            return True
    return False


def _end(connection: StreamConnection) -> str | None:
    """Waits for the end of the connection. Returns how it ended; None if the cluster was shut down."""
    try:
        while not isinstance(connection.receive(None), messages.Shutdown):
            pass
    except ConnectionLost as lost:
        return str(lost)
    return None
