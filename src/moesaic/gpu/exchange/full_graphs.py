"""The parts of a worker whose decode steps are one CUDA graph each, though its experts are on servers."""

from __future__ import annotations

import logging
import platform

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.experts.remote import RemoteExperts
from moesaic.gpu.exchange.exchange import DeviceExchange
from moesaic.gpu.exchange.exchange_launches import ExchangeOperations, GraphKernels
from moesaic.gpu.exchange.exchanged_step import ExchangedRunner
from moesaic.gpu.exchange.server_mailbox import IpcDialer, MailboxDialer
from moesaic.gpu.graphs.graphs import GraphRunner
from moesaic.gpu.ipc import device_sharing
from moesaic.gpu.ipc.device_sharing import DeviceSharing
from moesaic.gpu.nvshmem import symmetric_heap
from moesaic.gpu.nvshmem.job import NvshmemJob
from moesaic.gpu.nvshmem.nvshmem_mailbox import NvshmemDialer
from moesaic.kernels.table import MOST_RECORDED_ROWS
from moesaic.policy.fleet.replicas import Replicas
from moesaic.runtime.context import AskingParts, WorkerContext
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.running_step import SegmentRunner
from moesaic.runtime.step.stages import BlockStages

LOG = logging.getLogger(__name__)
X86 = ("x86_64", "AMD64")
"""Hosts whose CPUs see the writes of a device in their order."""


def check_full_graphs(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that need expert servers, each with a GPU of its own."""
    if not config.remote_experts:
        raise ConfigError.field("--expert-servers", 0, "at least 1 with --cudagraph-mode full")
    if config.transport not in ("cuda_ipc", "nvshmem"):
        allowed_values = "cuda_ipc, nvshmem with --cudagraph-mode full"
        raise ConfigError.field("--transport", config.transport, allowed_values)
    if platform.machine() not in X86:
        line = "--cudagraph-mode full: servers read what kernels post without the barriers of this host's CPU"
        raise ConfigError(f"{line}, {platform.machine()}; allowed: piecewise")
    if config.model.device != "cuda":
        raise ConfigError.field("--device", config.model.device, "cuda with --cudagraph-mode full")
    if config.beside:
        raise ConfigError(
            "--cudagraph-mode full: each process needs a GPU of its own, since a kernel that waits would "
            f"keep others from theirs; {config.beside} other processes share this worker's; see --devices"
        )


def full_graphs(
    context: WorkerContext,
    stages: BlockStages,
    layout: ExpertLayout,
    remote: RemoteExperts,
    replicas: Replicas,
    parts: SegmentRunner,
) -> AskingParts:
    """parts: computes steps in parts, by `remote`. Raises ConfigError where kernels cannot ask servers."""
    kernels, table_width = stages.model.kernels, -(-context.limits.max_model_len // stages.block_size)
    if not isinstance(kernels, GraphKernels) or kernels.recorder is None or kernels.exchange is None:
        raise ConfigError("--cudagraph-mode full: this Triton has no atomic loads; pip install -U triton")
    if stages.model.spec.states is not None:
        LOG.warning(
            "--cudagraph-mode full: steps are computed in parts, since this model keeps states, which a step "
            "that is computed once more would change twice"
        )
        return AskingParts(parts, remote, remote.stats)
    sharing = device_sharing.sharing(stages.device)
    operations, dialer = _make_exchange_parts(context, kernels, layout, sharing, stages.device)
    exchange = DeviceExchange(
        remote,
        replicas,
        layout,
        sharing,
        operations,
        dialer,
        stages.device,
        MOST_RECORDED_ROWS,
        context.clock,
    )
    eager = EagerRunner(stages, exchange.experts)
    graphs = GraphRunner(eager, exchange.recorder(kernels.recorder), table_width, direct=True)
    return AskingParts(ExchangedRunner(exchange, graphs, parts), exchange, exchange.stats)


def _make_exchange_parts(
    context: WorkerContext,
    kernels: GraphKernels,
    layout: ExpertLayout,
    sharing: DeviceSharing,
    device: torch.device,
) -> tuple[ExchangeOperations, MailboxDialer]:
    """What the graphs ask servers by: NVSHMEM, or CUDA IPC."""
    assert kernels.exchange is not None and kernels.nvshmem_exchange is not None
    if context.config.transport == "nvshmem":
        job = NvshmemJob(
            symmetric_heap.jobs(device), layout, MOST_RECORDED_ROWS, context.kept_model.membership
        )
        return kernels.nvshmem_exchange, NvshmemDialer(job, sharing, device, layout.hidden)
    return kernels.exchange, IpcDialer(
        sharing, MOST_RECORDED_ROWS, MOST_RECORDED_ROWS * layout.top_k, layout.hidden
    )
