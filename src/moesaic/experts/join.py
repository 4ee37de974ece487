"""An expert server that joins a running cluster over TCP, from this or another machine.

A cluster gives up a server that was silent for too long. A server that was frozen or cut off then finds its
connections closed. The cluster cannot restart such a server, so the server joins again as a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moesaic.config import ExpertServerConfig, KernelName, QueueConfig, QueuePolicyName, Schedule
from moesaic.core import messages
from moesaic.core.errors import CheckpointError, ConfigError, ConnectionLost, MoesaicError
from moesaic.experts.process import serve
from moesaic.models import fingerprint
from moesaic.models.gguf.header import is_gguf
from moesaic.policy.fleet.silence import RULE
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Refused, SentAway, Terms, prove_as_client
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.sealed_socket import wire
from moesaic.transport.stream import StreamConnection
from moesaic.transport.wakeup import Wakeup

HANDSHAKE_SECONDS = 10.0
DELAYS = (0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0)
"""Seconds before each attempt to join again. Together they leave a restarted cluster about a minute."""
REFUSALS = 3
"""Attempts to join again after which a refusal in the handshake is believed.

Nobody has vouched for such a refusal: a bit that was changed on the way causes one too.
"""


@dataclass(frozen=True)
class JoinOptions:
    """How a server joins a cluster."""

    cluster: str
    """tcp:HOST:PORT on which the cluster accepts servers."""
    secret: bytes
    listen: str | None = None
    """tcp:HOST:PORT on which attention workers reach this server.

    None: any port of this host's address that the cluster connection uses.
    """
    model: Path | None = None
    """Path of the checkpoint on this machine. None: the same path as on the cluster's machine."""
    threads: int = 1
    kernels: KernelName | None = None
    """Kernels to use. None: those of the cluster."""
    capacity: float = 1.0
    """Weight of this server's share of the experts, relative to the other servers."""


def join(
    joining: JoinOptions,
    on_joined: Callable[[messages.Enlisted], None],
    on_lost: Callable[[ConnectionLost], None] = lambda lost: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Serve until the cluster shuts this server down. Returns the exit code 0.

    on_joined: called each time the server has joined, with what it serves.
    on_lost: called each time the connection broke after that. The server then joins again, after DELAYS.

    Raises ConfigError for settings that cannot work. Raises ConnectionLost when the cluster cannot be reached
    the first time, refuses the server, or does not come back.
    """
    tries: int | None = None
    """Attempts to join since the server was last in the cluster. None before it joined the first time."""

    def joined(enlisted: messages.Enlisted) -> None:
        nonlocal tries
        tries = 0
        on_joined(enlisted)

    while True:
        try:
            return _once(joining, joined)
        except ConnectionLost as error:
            if tries is None or isinstance(error, SentAway):
                raise
            if isinstance(error, Refused) and tries >= REFUSALS:
                raise
            if tries == len(DELAYS):
                raise ConnectionLost(f"{error}; given up after {tries} attempts to join again") from error
            if not tries:
                on_lost(error)
        sleep(DELAYS[tries])
        tries += 1


def _once(joining: JoinOptions, on_joined: Callable[[messages.Enlisted], None]) -> int:
    """Join and serve like `join`, until the connection breaks."""
    wakeup = Wakeup()
    supervisor, here = _connect(joining, wakeup)
    try:
        supervisor.send(messages.Enlist(joining.capacity))
        enlisted = supervisor.receive(None)
        if isinstance(enlisted, messages.Shutdown):
            raise SentAway("the cluster is shutting down and accepts no servers")
        if not isinstance(enlisted, messages.Enlisted):
            raise ConnectionLost(f"{joining.cluster}: its first message was not Enlisted")
        on_joined(enlisted)
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
    if not model.is_dir() and not (is_gguf(model) and model.is_file()):
        allowed = "a directory with the checkpoint that is served, or its GGUF file"
        raise ConfigError.field("--model", str(model), allowed)
    stamp = fingerprint.stamp(model)
    other = fingerprint.difference(fingerprint.of(model), enlisted.layout.weights)
    if other:
        allowed = f"the checkpoint that {joining.cluster} serves; this one has other {other}"
        raise ConfigError.field("--model", str(model), allowed)
    return ExpertServerConfig(
        model=str(model),
        layout=enlisted.layout,
        checkpoint_stamp=stamp,
        joined=True,
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
    """Connect to the cluster. Returns the connection and this machine's address on it."""
    where = addresses.parse(joining.cluster)
    try:
        sock = addresses.dial(where, HANDSHAKE_SECONDS)
    except OSError as error:
        raise ConnectionLost(f"no connection to {joining.cluster}: {error.strerror or error}") from error
    try:
        terms = Terms("stream", MIN_HEAP)
        keys = prove_as_client(sock, joining.secret, terms, Deadline(HANDSHAKE_SECONDS))
    except (OSError, MoesaicError) as error:
        sock.close()
        kind = Refused if isinstance(error, Refused) else ConnectionLost
        raise kind(f"no connection to {joining.cluster}: {error}") from error
    here = str(sock.getsockname()[0])
    return StreamConnection(wire(sock, keys), on_message=wakeup.ring, silent_limit=RULE.lost_supervisor), here
