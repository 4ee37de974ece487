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
    from moesaic.config import ClusterConfig, ExpertServerConfig
    from moesaic.core.job_membership import JobMembership
    from moesaic.experts.server_memory import ServerTransport
    from moesaic.kernels.table import Kernels
    from moesaic.planning.hardware.device import Copy, Device
    from moesaic.planning.hardware.timing import Show, Stopwatch

# ---- kernels


def triton_kernels(kind: str, reference: Kernels) -> Kernels | None:
    """The kernels of --kernels triton for a kind of device. None: that device cannot run them.

    Raises ImportError if Triton is not installed.
    """
    from moesaic.gpu.triton.table import triton_kernels

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


def job_places(members: Members, cluster: ClusterConfig) -> JobPlaces:
    """The places in the NVSHMEM job of a cluster with --transport nvshmem."""
    from moesaic.gpu.nvshmem.places import NvshmemPlaces

    return NvshmemPlaces(members, cluster)


# ---- measurements


def cuda_device() -> Device:
    """The CUDA device that torch uses, to be measured."""
    from moesaic.gpu.hardware import Cuda

    return Cuda()


def measure_copies(device: Device, size: int, stopwatch: Stopwatch, show: Show) -> tuple[Copy, ...]:
    """Measure all kinds of copies between host and device, `size` bytes at a time."""
    from moesaic.gpu.hardware import copies

    return copies(device, size, stopwatch, show)
