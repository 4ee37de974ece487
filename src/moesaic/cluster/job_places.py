"""The places of processes in a job of GPUs, for a cluster whose transport needs one."""

from __future__ import annotations

from typing import Protocol

from moesaic.cluster.members import Members
from moesaic.config import ON_GPUS, ClusterConfig
from moesaic.core import gpu_parts


class JobPlaces(Protocol):
    """Gives the processes of one cluster their places. Only the supervisor's thread uses it."""

    def look(self) -> None:
        """Form the job once enough processes serve, and tell each process its place."""
        ...


def places_of(members: Members, cluster: ClusterConfig) -> JobPlaces | None:
    """The places in the job of a cluster. None: its transport needs no job."""
    return gpu_parts.job_places(members, cluster) if cluster.transport in ON_GPUS else None
