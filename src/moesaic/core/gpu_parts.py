"""The only door to `moesaic.gpu`, which holds what only a GPU runs.

Shared code calls a function of this module when the configuration names a GPU or something of it: --device
cuda, --kernels triton, --cudagraph-mode, --transport cuda_ipc or nvshmem. Each function imports its part when
it is called, so no other process loads any of it. The Protocols of the parts stand beside their users.

Question: How does shared code reach what only a GPU runs?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesaic.config import ExpertServerConfig
    from moesaic.core.job_membership import JobMembership
    from moesaic.experts.server_memory import ServerTransport

# ---- expert servers


def server_transport(config: ExpertServerConfig, membership: JobMembership) -> ServerTransport:
    """What an expert server needs whose rows stay on GPUs."""
    from moesaic.gpu.exchange.server_transport import server_transport

    return server_transport(config, membership)
