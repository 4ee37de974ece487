"""Chooses the transport between attention workers and expert servers.

Question: Which transport connects workers and expert servers (`--transport`)?
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from moesaic.config import ON_GPUS, ClusterConfig, HostTransport, Transport, WorkerConfig, ucx_tls
from moesaic.core import gpu_parts
from moesaic.core.errors import ConfigError
from moesaic.transport.nixl_link import check_nixl

LOG = logging.getLogger(__name__)
COMPILED_MODULE = "moesaic.transport._shm"
"""The compiled module. It is missing if moesaic was installed without a compiler, or not on Linux."""


def host_transport(transport: Transport) -> HostTransport:
    """Returns the transport that `--transport` means in this installation.

    Raises ConfigError for shm and cuda_ipc if the compiled module is missing, for nixl if NIXL cannot be
    used, and for nvshmem if NVSHMEM's bindings are not installed.

    >>> host_transport("socket")
    'socket'
    """
    if transport == "socket":
        return "socket"
    if transport == "nixl":
        check_nixl(ucx_tls())
        LOG.warning("--transport nixl: rows, answers and KV between hosts are not encrypted")
        return "nixl"
    if transport == "nvshmem":
        gpu_parts.check_nvshmem()
        LOG.warning("--transport nvshmem: rows and answers of decode steps are not encrypted between hosts")
        return "nvshmem"
    if transport == "cuda_ipc" and find_spec(COMPILED_MODULE) is not None:
        return "cuda_ipc"
    if find_spec(COMPILED_MODULE) is not None:
        return "shm"
    if transport in ("shm", "cuda_ipc"):
        raise ConfigError.field(
            "--transport", transport, f"auto, socket (the compiled module {COMPILED_MODULE} is missing)"
        )
    return "socket"


def choose_transport(cluster: ClusterConfig, worker: WorkerConfig) -> HostTransport:
    """`host_transport` of a cluster whose attention workers have these settings.

    Raises ConfigError, too, if --transport cuda_ipc or nvshmem does not go with them: rows are then on GPUs,
    of this host or of any, so attention workers and expert servers each need one. So it does for a wrong
    --nvshmem-pes.
    """
    transport, pes = cluster.transport, cluster.nvshmem_pes
    least = cluster.attention_workers + cluster.expert_servers
    if pes is not None and transport != "nvshmem":
        raise ConfigError.field("--transport", transport, "nvshmem with --nvshmem-pes")
    if pes is not None and not (isinstance(pes, int) and pes >= least):  # from Python anything may come
        choices = f"at least {least}, --attention-workers and --expert-servers together"
        raise ConfigError.field("--nvshmem-pes", pes, choices)
    if transport in ON_GPUS:
        reasons = _rows_on_gpus(cluster, worker)
        reasons |= _one_host(cluster, worker) if transport == "cuda_ipc" else _graphs(cluster, worker)
        for reason, applies in reasons.items():
            if applies:
                raise ConfigError.field("--transport", transport, f"auto, shm, socket with {reason}")
    return host_transport(transport)


def _rows_on_gpus(cluster: ClusterConfig, worker: WorkerConfig) -> dict[str, bool]:
    """Why rows cannot stay on GPUs -> whether that is so."""
    device = worker.model.device
    return {
        f"--device {device}: workers and expert servers need --device cuda": device != "cuda",
        "--fast-memory": worker.server_memory is not None or worker.offload is not None,
        "--paced: modelled devices hold rows of the host": cluster.paced is not None,
    }


def _one_host(cluster: ClusterConfig, worker: WorkerConfig) -> dict[str, bool]:
    """The same of rows that stay on the GPUs of this host."""
    return {
        "--cluster-address: all processes are on this host": cluster.cluster_address is not None,
        "--distributed-executor-backend ray: all processes are on this host": cluster.on_ray,
        "--relay always: all processes are on this host": worker.scheduler.relay == "always",
    }


def _graphs(cluster: ClusterConfig, worker: WorkerConfig) -> dict[str, bool]:
    """The same of rows that the graphs of decode steps send to GPUs of any host."""
    mode = worker.model.cudagraph_mode
    return {
        f"--cudagraph-mode {mode}: only graphs of whole steps use NVSHMEM": mode != "full",
        "--distributed-executor-backend ray: no job of NVSHMEM is formed there": cluster.on_ray,
        "--relay always: a graph sends rows to each server itself": worker.scheduler.relay == "always",
    }
