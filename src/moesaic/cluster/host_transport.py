"""Chooses the transport between attention workers and expert servers."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from moesaic.config import ClusterConfig, HostTransport, Transport, WorkerConfig, ucx_tls
from moesaic.core.errors import ConfigError
from moesaic.transport.nixl_link import check_nixl

LOG = logging.getLogger(__name__)
COMPILED = "moesaic.transport._shm"
"""The compiled module. It is missing if moesaic was installed without a compiler, or not on Linux."""


def host_transport(asked: Transport) -> HostTransport:
    """Returns the transport that `--transport` means in this installation.

    Raises ConfigError for shm and cuda_ipc if the compiled module is missing, and for nixl if NIXL cannot be
    used.

    >>> host_transport("socket")
    'socket'
    """
    if asked == "socket":
        return "socket"
    if asked == "nixl":
        check_nixl(ucx_tls())
        LOG.warning("--transport nixl: rows, answers and KV between hosts are not encrypted")
        return "nixl"
    if asked == "cuda_ipc" and find_spec(COMPILED) is not None:
        return "cuda_ipc"
    if find_spec(COMPILED) is not None:
        return "shm"
    if asked in ("shm", "cuda_ipc"):
        raise ConfigError.field(
            "--transport", asked, f"auto, socket (the compiled module {COMPILED} is missing)"
        )
    return "socket"


def transport_of(cluster: ClusterConfig, worker: WorkerConfig) -> HostTransport:
    """`host_transport` of a cluster whose attention workers have these settings.

    Raises ConfigError, too, if --transport cuda_ipc does not go with them: rows then stay on the GPUs of this
    host, so attention workers and expert servers each need one.
    """
    if cluster.transport == "cuda_ipc":
        _check_gpus(cluster, worker)
    return host_transport(cluster.transport)


def _check_gpus(cluster: ClusterConfig, worker: WorkerConfig) -> None:
    device = worker.model.device
    reasons = {
        f"--device {device}: workers and expert servers need --device cuda": device != "cuda",
        "--fast-memory": worker.server_memory is not None or worker.offload is not None,
        "--cluster-address: all processes are on this host": cluster.cluster_address is not None,
        "--distributed-executor-backend ray: all processes are on this host": cluster.on_ray,
        "--relay always: all processes are on this host": worker.scheduler.relay == "always",
        "--paced: modelled devices hold rows of the host": cluster.paced is not None,
    }
    for reason, refused in reasons.items():
        if refused:
            raise ConfigError.field("--transport", "cuda_ipc", f"auto, shm, socket with {reason}")
