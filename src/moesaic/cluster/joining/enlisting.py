"""The first messages of a process that joins: it says its role, and gets its settings."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moesaic.cluster.joining.options import JoinOptions
from moesaic.config import ExpertServerConfig, WorkerConfig, ucx_tls
from moesaic.core import messages
from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.gpu.nvshmem.package import check_installed
from moesaic.models import fingerprint
from moesaic.models.gguf.header import is_gguf
from moesaic.policy.fleet.silence import RULE
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, Refused, SentAway, Terms, prove_as_client
from moesaic.transport.calls import MIN_HEAP
from moesaic.transport.host import this_host
from moesaic.transport.nixl_link import check_nixl
from moesaic.transport.sealed_socket import wire
from moesaic.transport.sealing import Keys
from moesaic.transport.stream import StreamConnection

try:
    from moesaic.kernels.native import plain
except ImportError:  # installed without a compiler
    plain = None  # type: ignore[assignment]

LOG = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0
DIAL_SECONDS = 2.0
"""The same if there are several addresses, since the host of one may be gone."""


def connect(
    joining: JoinOptions,
    secret: bytes,
    on_lost: Callable[[], None] | None,
    on_message: Callable[[], None],
    seconds: float | None = None,
) -> tuple[StreamConnection, str]:
    """Connect to the cluster, at the first of its addresses that answers. Returns the connection and this
    host's address on it.

    on_lost, on_message: see StreamConnection. seconds: for each address. Raises Refused for another
    secret or version, otherwise ConnectionLost.
    """
    errors: list[ConnectionLost] = []
    several = len(joining.addresses) > 1
    seconds = seconds or (DIAL_SECONDS if several else HANDSHAKE_SECONDS)
    for address in joining.addresses:
        try:
            sock, keys = _dial(address, secret, seconds)
        except ConnectionLost as error:
            errors.append(error)
            continue
        if several:
            LOG.info("connected to %s", address)
        here = str(sock.getsockname()[0])
        return StreamConnection(wire(sock, keys), on_lost, on_message, RULE.lost_supervisor), here
    kind = Refused if all(isinstance(error, Refused) for error in errors) else ConnectionLost
    raise kind("; ".join(map(str, errors)))


def check_addresses(joining: JoinOptions) -> None:
    """Raises ConfigError for an address of the cluster that is none."""
    for address in joining.addresses:
        addresses.parse(address)


def _dial(address: str, secret: bytes, seconds: float) -> tuple[socket.socket, Keys]:
    """A connected socket, and the keys of the connection. Raises as `connect` does."""
    try:
        sock = addresses.dial(addresses.parse(address), seconds)
    except OSError as error:
        raise ConnectionLost(f"no connection to {address}: {error.strerror or error}") from error
    try:
        keys = prove_as_client(sock, secret, Terms("stream", MIN_HEAP), Deadline(seconds))
    except (OSError, MoesaicError) as error:
        sock.close()
        kind = Refused if isinstance(error, Refused) else ConnectionLost
        raise kind(f"no connection to {address}: {error}") from error
    return sock, keys


@contextmanager
def told(connection: StreamConnection, joining: JoinOptions) -> Iterator[None]:
    """Inside, the cluster is told of a ConfigError, and a ConnectionLost names the cluster."""
    try:
        yield
    except ConfigError as error:
        connection.send(messages.Failed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise type(lost)(f"{joining.cluster}: {lost}") from lost


def enlist(
    connection: StreamConnection, joining: JoinOptions, kept: Mapping[int, Sequence[int]] | None = None
) -> messages.Enlisted:
    """Send the role of this process, and send back the messages that measure the link.

    kept: for a server, layer -> the experts that it has in memory. Returns the settings that the cluster
    answers.

    Raises SentAway if the cluster refuses it, and ConnectionLost.
    """
    capacity = joining.capacity or float(threads_of(joining))
    sets = [] if joining.kernels is not None else list(instruction_sets())
    loaded = {layer: list(experts) for layer, experts in (kept or {}).items()}
    connection.send(messages.Enlist(joining.role, capacity, this_host(), sets, joining.ticket, loaded))
    answer = connection.receive(None)
    while isinstance(answer, messages.LinkTest):
        connection.send(answer)
        answer = connection.receive(None)
    match answer:
        case messages.Enlisted():
            return answer
        case messages.Shutdown():
            raise SentAway("the cluster is shutting down and accepts no processes")
        case messages.Refuse(reason):
            raise SentAway(f"refused this process: {reason}")
    raise ConnectionLost("its first message was not Enlisted")


def server_config(joining: JoinOptions, enlisted: messages.Enlisted, here: str) -> ExpertServerConfig:
    """The settings of an expert server on this host. here: its address towards the cluster.

    Raises ConfigError for a checkpoint that is not there, or is another one.
    """
    told = ExpertServerConfig.from_json(enlisted.config)
    _check_host(told)
    model, stamp = checkpoint(joining, enlisted)
    device = told.device if joining.device in (None, "auto") else joining.device
    if told.transport == "nvshmem" and device != "cuda":
        raise ConfigError.field("--device", device, "cuda: the cluster has --transport nvshmem")
    return replace(
        told,
        model=str(model),
        checkpoint_stamp=stamp,
        joined=True,
        remote_address=joining.listen or str(addresses.Address(host=here)),
        kernels=joining.kernels or told.kernels,
        device=device,
        threads=threads_of(joining),
        log_level=joining.log_level,
    )


def worker_config(joining: JoinOptions, enlisted: messages.Enlisted, here: str) -> WorkerConfig:
    """The settings of an attention worker on this host. Otherwise like `server_config`."""
    told = WorkerConfig.from_json(enlisted.config)
    _check_host(told, ("--placement", told.parallel.placement))
    path, stamp = checkpoint(joining, enlisted)
    model = replace(
        told.model,
        model=str(path),
        kernels=joining.kernels or told.model.kernels,
        device=joining.device or told.model.device,
        threads=joining.threads,
    )
    return replace(
        told,
        model=model,
        checkpoint_stamp=stamp,
        remote_address=joining.listen or str(addresses.Address(host=here)),
        log_level=joining.log_level,
        most_threads=None,  # the other one is a share of the cores there
    )


def checkpoint(joining: JoinOptions, enlisted: messages.Enlisted) -> tuple[Path, str]:
    """The checkpoint on this host, and the stamp of its files as they were compared.

    Raises ConfigError if it is not there, or if it is not the one that the cluster serves.
    """
    model = Path(joining.model or enlisted.model)
    check_path(model)
    stamp = fingerprint.stamp(model)
    other = fingerprint.difference(fingerprint.compute_fingerprint(model), enlisted.weights)
    if other:
        allowed = f"the checkpoint that {joining.cluster} serves; this one has other {other}"
        raise ConfigError.field("--model", str(model), allowed)
    return model, stamp


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of the native kernels that this host can run; empty if the kernels were not built."""
    return () if plain is None else plain.instruction_sets()


def _check_host(told: ExpertServerConfig | WorkerConfig, *more: tuple[str, str | None]) -> None:
    """Raises ConfigError if this host lacks what the cluster's settings name: files, NIXL or NVSHMEM. more:
    flags and their files besides."""
    if told.transport == "nixl":
        check_nixl(ucx_tls())
    if told.transport == "nvshmem":
        check_installed()
    for flag, file in (("--paced", told.paced), ("--schedule-policy-file", told.policy_file), *more):
        if file is not None and not Path(file).is_file():
            raise ConfigError.field(flag, file, "a file at the same path as on the host of moesaic serve")


def check_path(model: Path) -> None:
    """Raises ConfigError if there is no checkpoint at this path."""
    if not model.is_dir() and not (is_gguf(model) and model.is_file()):
        allowed = "a directory with the checkpoint that is served, or its GGUF file"
        raise ConfigError.field("--model", str(model), allowed)


def threads_of(joining: JoinOptions) -> int:
    """Compute threads of the process."""
    return joining.threads or len(os.sched_getaffinity(0))
