"""The only door to `moesaic.gpu`, which holds what only a GPU runs.

Shared code calls a function of this module when the configuration names a GPU or something of it: --device
cuda, --kernels triton, --cudagraph-mode, --transport cuda_ipc or nvshmem. Each function imports its part when
it is called, so no other process loads any of it. The Protocols of the parts stand beside their users.

Question: How does shared code reach what only a GPU runs?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesaic.cluster.job_places import JobPlaces
    from moesaic.cluster.members import Members
    from moesaic.config import ClusterConfig, ExpertServerConfig, WorkerConfig
    from moesaic.core.experts import ExpertLayout
    from moesaic.core.job_membership import JobMembership
    from moesaic.experts.remote import RemoteExperts
    from moesaic.experts.server_memory import ServerTransport
    from moesaic.experts.worker_memory import WorkerMemory
    from moesaic.gpu.graphs.graphs import GraphRunner
    from moesaic.gpu.ranks.recorded_attention import AttentionRecordings, RecordedAttention
    from moesaic.gpu.ranks.recorded_rank import RecordedRank
    from moesaic.kernels.table import Kernels
    from moesaic.planning.hardware.device import Copy, Device
    from moesaic.planning.hardware.timing import Show, Stopwatch
    from moesaic.policy.fleet.replicas import Replicas
    from moesaic.runtime.context import AskingParts, WorkerContext
    from moesaic.runtime.step.running_step import SegmentRunner
    from moesaic.runtime.step.stages import BlockStages

# ---- attention workers


def graph_runner() -> type[GraphRunner]:
    """The class of runners that record decode steps as CUDA graphs."""
    from moesaic.gpu.graphs.graphs import GraphRunner

    return GraphRunner


def check_full_graphs(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that do not go with --cudagraph-mode full."""
    from moesaic.gpu.exchange.full_graphs import check_full_graphs

    check_full_graphs(config)


def full_graphs(
    context: WorkerContext,
    stages: BlockStages,
    layout: ExpertLayout,
    remote: RemoteExperts,
    replicas: Replicas,
    parts: SegmentRunner,
) -> AskingParts:
    """The parts of a worker with --cudagraph-mode full: its graphs ask the servers.

    parts: computes steps in parts, by `remote`. Raises ConfigError where kernels cannot ask servers.
    """
    from moesaic.gpu.exchange.full_graphs import full_graphs

    return full_graphs(context, stages, layout, remote, replicas, parts)


def worker_memory(transport: str, device: str) -> WorkerMemory | None:
    """The memory of a worker whose rows stay on GPUs. None: requests that no graph sends go through the host.

    Raises ConfigError for a worker without a GPU.
    """
    from moesaic.gpu.ipc.device_rows import worker_memory

    return worker_memory(transport, device)


def recorded_attention() -> type[RecordedAttention]:
    """The class of what the first of several ranks records of a step's attention."""
    from moesaic.gpu.ranks.recorded_attention import RecordedAttention

    return RecordedAttention


def attention_recordings() -> type[AttentionRecordings]:
    """The class of what the other ranks record and replay of it."""
    from moesaic.gpu.ranks.recorded_attention import AttentionRecordings

    return AttentionRecordings


def recorded_rank() -> type[RecordedRank]:
    """The class of what records the decode steps of a rank that holds a share of the experts."""
    from moesaic.gpu.ranks.recorded_rank import RecordedRank

    return RecordedRank


# ---- kernels


def triton_kernels(kind: str, reference: Kernels) -> Kernels | None:
    """The kernels of --kernels triton for a kind of device. None: that device cannot run them.

    Raises ImportError if Triton is not installed.
    """
    from moesaic.gpu.triton.operations import triton_kernels

    return triton_kernels(kind, reference)


# ---- expert servers


def server_transport(config: ExpertServerConfig, membership: JobMembership) -> ServerTransport:
    """What an expert server needs whose rows stay on GPUs."""
    from moesaic.gpu.exchange.server_transport import server_transport

    return server_transport(config, membership)


# ---- clusters


def check_nvshmem() -> None:
    """Raises ConfigError if NVSHMEM's bindings are not installed."""
    from moesaic.gpu.nvshmem.package import check_installed

    check_installed()


def job_places(members: Members, cluster: ClusterConfig) -> JobPlaces | None:
    """The places in the NVSHMEM job of a cluster with --transport nvshmem. None: it has another transport."""
    from moesaic.gpu.nvshmem.places import NvshmemPlaces

    return NvshmemPlaces(members, cluster) if cluster.transport == "nvshmem" else None


# ---- measurements


def cuda_device() -> Device:
    """The CUDA device that torch uses, to be measured."""
    from moesaic.gpu.hardware import Cuda

    return Cuda()


def measure_copies(device: Device, size: int, stopwatch: Stopwatch, show: Show) -> tuple[Copy, ...]:
    """Measure all kinds of copies between host and device, `size` bytes at a time."""
    from moesaic.gpu.hardware import copies

    return copies(device, size, stopwatch, show)
