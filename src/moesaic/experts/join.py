"""An expert server that joins a running cluster by hand, from this or another machine, over TCP.

A cluster that heard nothing of it for a while has given it up: a server that was frozen, or cut off, finds
its connections closed. Nobody there can restart it, so it joins again by itself, as a new server.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moesaic.config import ExpertServerConfig, KernelName, QueueConfig, QueuePolicyName, Schedule
from moesaic.core import messages
from moesaic.core.errors import CheckpointError, ConfigError, ConnectionLost, MoesaicError
from moesaic.experts.process import serve
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Refused, Terms, prove_as_client
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

HANDSHAKE_SECONDS = 10.0
DELAYS = (0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
"""Seconds before each attempt to join again; a cluster that is started anew has a minute for that."""


@dataclass(frozen=True)
class JoinOptions:
    """How a server joins."""

    cluster: str
    """tcp:HOST:PORT of the cluster's doorway."""
    secret: bytes
    listen: str | None = None
    """tcp:HOST:PORT where attention workers find it; None: any port of the address that the cluster sees."""
    model: Path | None = None
    """The checkpoint here; None: where it is on the cluster's machine."""
    threads: int = 1
    kernels: KernelName | None = None
    """None: what the cluster was started with."""
    capacity: float = 1.0
    """Weight of this server's share, beside those of the others."""


def join(
    joining: JoinOptions,
    told: Callable[[messages.Enlisted], None],
    lost: Callable[[ConnectionLost], None] = lambda lost: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Serve until the cluster sends it away: 0.

    told: called each time it has joined, with what it is to serve. lost: called each time the connection
    broke after that; then it joins again, after DELAYS. Raises ConfigError for what can never work,
    ConnectionLost when the cluster cannot be joined the first time, refuses, or is gone for good.
    """
    tries: int | None = None
    """Since it was in the cluster; None: it never was."""

    def joined(enlisted: messages.Enlisted) -> None:
        nonlocal tries
        tries = 0
        told(enlisted)

    while True:
        try:
            return _once(joining, joined)
        except Refused:
            raise
        except ConnectionLost as error:
            if tries is None:
                raise
            if tries == len(DELAYS):
                raise ConnectionLost(f"{error}; given up after {tries} attempts to join again") from error
            if not tries:
                lost(error)
        sleep(DELAYS[tries])
        tries += 1


def _once(joining: JoinOptions, told: Callable[[messages.Enlisted], None]) -> int:
    """Like `join`, until the connection breaks."""
    wakeup = Wakeup()
    supervisor, here = _connect(joining, wakeup)
    try:
        supervisor.send(messages.Enlist(joining.capacity))
        enlisted = supervisor.receive(None)
        if isinstance(enlisted, messages.Shutdown):
            raise Refused("it takes no servers any more")
        if not isinstance(enlisted, messages.Enlisted):
            raise ConnectionLost(f"{joining.cluster}: its first word was not Enlisted")
        told(enlisted)
        config = _config(joining, enlisted, here)
        return serve(supervisor, config, wakeup, joining.secret)
    except (ConfigError, CheckpointError) as error:
        supervisor.send(messages.Failed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise type(lost)(f"{joining.cluster}: {lost}") from lost
    finally:
        supervisor.close()
        wakeup.close()


def _config(joining: JoinOptions, enlisted: messages.Enlisted, here: str) -> ExpertServerConfig:
    model = Path(enlisted.model) if joining.model is None else joining.model
    if not model.is_dir():
        raise ConfigError.field("--model", str(model), "a directory with the checkpoint that is served")
    return ExpertServerConfig(
        model=str(model),
        layout=enlisted.layout,
        address=joining.listen or str(addresses.Address(host=here)),
        kernels=joining.kernels or cast("KernelName", enlisted.kernels),
        mmap=enlisted.mmap,
        threads=joining.threads,
        schedule=cast("Schedule", enlisted.schedule),
        queue_policy=cast("QueuePolicyName", enlisted.queue_policy),
        queues=QueueConfig(
            enlisted.queue_urgency,
            enlisted.queue_history,
            enlisted.expert_batch_pairs,
            enlisted.expert_batch_wait,
        ),
    )


def _connect(joining: JoinOptions, wakeup: Wakeup) -> tuple[StreamConnection, str]:
    """The connection, and this machine's address on it."""
    where = addresses.parse(joining.cluster)
    try:
        sock = addresses.dial(where, HANDSHAKE_SECONDS)
    except OSError as error:
        raise ConnectionLost(f"no connection to {joining.cluster}: {error.strerror or error}") from error
    try:
        terms = Terms("stream", MIN_HEAP)
        prove_as_client(sock, joining.secret, terms, Deadline(HANDSHAKE_SECONDS))
    except (OSError, MoesaicError) as error:
        sock.close()
        kind = Refused if isinstance(error, Refused) else ConnectionLost
        raise kind(f"no connection to {joining.cluster}: {error}") from error
    here = str(sock.getsockname()[0])
    return StreamConnection(_blocking(sock), on_message=wakeup.ring), here


def _blocking(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    return sock
