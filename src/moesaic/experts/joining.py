"""An expert server that joins a running cluster by hand, from this or another machine, over TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moesaic.config import ExpertServerConfig, KernelName, QueuePolicyName, Schedule
from moesaic.core import messages
from moesaic.core.errors import CheckpointError, ConfigError, ConnectionLost, MoesaicError
from moesaic.experts.process import serve
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Terms, prove_as_client
from moesaic.transport.bell import Bell
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.stream import StreamConnection

HANDSHAKE_SECONDS = 10.0


@dataclass(frozen=True)
class Joining:
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


def join(joining: Joining, told: Callable[[messages.Enlisted], None]) -> int:
    """Serve until the cluster sends it away: 0. told: called once with what it is to serve.

    Raises ConfigError for what can never work, ConnectionLost when the cluster is gone or refuses.
    """
    bell = Bell()
    supervisor, here = _connect(joining, bell)
    try:
        enlisted = supervisor.receive(None)
        if not isinstance(enlisted, messages.Enlisted):
            raise ConnectionLost(f"{joining.cluster}: its first word was not Enlisted")
        told(enlisted)
        config = _config(joining, enlisted, here)
        return serve(supervisor, config, bell, joining.secret)
    except (ConfigError, CheckpointError) as error:
        supervisor.send(messages.Failed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise ConnectionLost(f"{joining.cluster}: {lost}") from lost
    finally:
        supervisor.close()
        bell.close()


def _config(joining: Joining, enlisted: messages.Enlisted, here: str) -> ExpertServerConfig:
    model = Path(enlisted.model) if joining.model is None else joining.model
    if not model.is_dir():
        raise ConfigError.field("--model", str(model), "a directory with the checkpoint that is served")
    return ExpertServerConfig(
        model=str(model),
        layout=enlisted.layout,
        address=joining.listen or str(addresses.Address(host=here)),
        kernels=joining.kernels or cast("KernelName", enlisted.kernels),
        threads=joining.threads,
        schedule=cast("Schedule", enlisted.schedule),
        queue_policy=cast("QueuePolicyName", enlisted.queue_policy),
    )


def _connect(joining: Joining, bell: Bell) -> tuple[StreamConnection, str]:
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
        raise ConnectionLost(f"no connection to {joining.cluster}: {error}") from error
    here = str(sock.getsockname()[0])
    return StreamConnection(_blocking(sock), on_message=bell.ring), here


def _blocking(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    return sock
