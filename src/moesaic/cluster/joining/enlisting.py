"""The first messages of a process that joins: it says its role, and gets its settings."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from moesaic.cluster.joining.options import JoinOptions
from moesaic.config import ExpertServerConfig, WorkerConfig, ucx_tls
from moesaic.core import gpu_parts, messages
from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.models import fingerprint
from moesaic.models.gguf.header import is_gguf
from moesaic.policy.fleet.silence import RULE
from moesaic.runtime.machine import cores
from moesaic.transport import address as addresses
from moesaic.transport.authentication import Deadline, PeerRefused, RefusedByCluster, Terms, prove_as_client
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

    on_lost, on_message: see StreamConnection. seconds: for each address. Raises PeerRefused for another
    secret or version, otherwise ConnectionLost.
    """
    errors: list[ConnectionLost] = []
    has_several = len(joining.addresses) > 1
    seconds = seconds or (DIAL_SECONDS if has_several else HANDSHAKE_SECONDS)
    for address in joining.addresses:
        try:
            sock, keys = _dial(address, secret, seconds)
        except ConnectionLost as error:
            errors.append(error)
            continue
        if has_several:
            LOG.info("connected to %s", address)
        own_address = str(sock.getsockname()[0])
        return StreamConnection(wire(sock, keys), on_lost, on_message, RULE.lost_supervisor), own_address
    # An address that could not be reached may be the right one, so one refusal is not enough.
    kind = PeerRefused if all(isinstance(error, PeerRefused) for error in errors) else ConnectionLost
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
        kind = PeerRefused if isinstance(error, PeerRefused) else ConnectionLost
        raise kind(f"no connection to {address}: {error}") from error
    return sock, keys


@contextmanager
def report_errors(connection: StreamConnection, joining: JoinOptions) -> Iterator[None]:
    """Inside, the cluster is told of a ConfigError, and a ConnectionLost names the cluster."""
    try:
        yield
    except ConfigError as error:
        connection.send(messages.WorkerFailed(str(error), user_error=True))
        raise
    except ConnectionLost as lost:
        raise type(lost)(f"{joining.cluster}: {lost}") from lost


def enlist(
    connection: StreamConnection,
    joining: JoinOptions,
    resident_experts: Mapping[int, Sequence[int]] | None = None,
) -> messages.EnlistReply:
    """Send the role of this process, and send back the messages that measure the link.

    resident_experts: for a server, layer -> the experts that it has in memory. Returns the settings that the
    cluster answers.

    Raises SentAway if the cluster refuses it, and ConnectionLost.
    """
    capacity = joining.capacity or float(count_threads(joining))
    # Kernels that the user chose are not compared with the cluster's (`Members._instruction_set`).
    sets = [] if joining.kernels is not None else list(instruction_sets())
    experts_by_layer = {layer: list(experts) for layer, experts in (resident_experts or {}).items()}
    connection.send(
        messages.Enlist(joining.role, capacity, this_host(), sets, joining.ticket, experts_by_layer)
    )
    answer = connection.receive(None)
    while isinstance(answer, messages.LinkTest):
        connection.send(answer)
        answer = connection.receive(None)
    match answer:
        case messages.EnlistReply():
            return answer
        case messages.Shutdown():
            raise RefusedByCluster("the cluster is shutting down and accepts no processes")
        case messages.Refuse(reason):
            raise RefusedByCluster(f"refused this process: {reason}")
    raise ConnectionLost("its first message was not Enlisted")


def server_config(joining: JoinOptions, answer: messages.EnlistReply, own_address: str) -> ExpertServerConfig:
    """The settings of an expert server on this host. own_address: its address towards the cluster.

    Raises ConfigError for a checkpoint that is not there, or is another one.
    """
    config = ExpertServerConfig.from_json(answer.config)
    _check_host(config)
    model, stamp = checkpoint(joining, answer)
    device = config.device if joining.device in (None, "auto") else joining.device
    if config.transport == "nvshmem" and device != "cuda":
        raise ConfigError.field("--device", device, "cuda: the cluster has --transport nvshmem")
    return replace(
        config,
        model=str(model),
        checkpoint_stamp=stamp,
        joined=True,
        remote_address=joining.listen or str(addresses.Address(host=own_address)),
        kernels=joining.kernels or config.kernels,
        device=device,
        threads=count_threads(joining),
        log_level=joining.log_level,
    )


def worker_config(joining: JoinOptions, answer: messages.EnlistReply, own_address: str) -> WorkerConfig:
    """The settings of an attention worker on this host. Otherwise like `server_config`."""
    config = WorkerConfig.from_json(answer.config)
    _check_host(config, ("--placement", config.parallel.placement))
    path, stamp = checkpoint(joining, answer)
    model = replace(
        config.model,
        model=str(path),
        kernels=joining.kernels or config.model.kernels,
        device=joining.device or config.model.device,
        threads=joining.threads,
    )
    return replace(
        config,
        model=model,
        checkpoint_stamp=stamp,
        remote_address=joining.listen or str(addresses.Address(host=own_address)),
        log_level=joining.log_level,
        most_threads=None,  # the other one is a share of the cores there
    )


def checkpoint(joining: JoinOptions, answer: messages.EnlistReply) -> tuple[Path, str]:
    """The checkpoint on this host, and the stamp of its files as they were compared.

    Raises ConfigError if it is not there, or if it is not the one that the cluster serves.
    """
    model = Path(joining.model or answer.model)
    check_path(model)
    stamp = fingerprint.stamp(model)
    difference = fingerprint.difference(fingerprint.compute_fingerprint(model), answer.weights)
    if difference:
        requirement = f"the checkpoint that {joining.cluster} serves; this one has other {difference}"
        raise ConfigError.field("--model", str(model), requirement)
    return model, stamp


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of the native kernels that this host can run; empty if the kernels were not built."""
    return () if plain is None else plain.instruction_sets()


def _check_host(config: ExpertServerConfig | WorkerConfig, *more_files: tuple[str, str | None]) -> None:
    """Raises ConfigError if this host lacks what the cluster's settings name: files, NIXL or NVSHMEM.
    more_files: flags and their files besides."""
    if config.transport == "nixl":
        check_nixl(ucx_tls())
    if config.transport == "nvshmem":
        gpu_parts.check_nvshmem()
    for flag, file in (
        ("--paced", config.paced),
        ("--schedule-policy-file", config.policy_file),
        *more_files,
    ):
        if file is not None and not Path(file).is_file():
            raise ConfigError.field(flag, file, "a file at the same path as on the host of moesaic serve")


def check_path(model: Path) -> None:
    """Raises ConfigError if there is no checkpoint at this path."""
    if not model.is_dir() and not (is_gguf(model) and model.is_file()):
        requirement = "a directory with the checkpoint that is served, or its GGUF file"
        raise ConfigError.field("--model", str(model), requirement)


def count_threads(joining: JoinOptions) -> int:
    """Compute threads of the process."""
    return joining.threads or cores()
