"""What the process of one of several models is told."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.config import (
    ClusterConfig,
    ConnectionConfig,
    CorsConfig,
    OffloadConfig,
    ServerConfig,
    WorkerConfig,
)
from moesaic.trace.options import RecordConfig


@dataclass(frozen=True)
class ServedModel:
    """The settings of `moesaic serve` for one model. Its process gets them as a pickle."""

    worker: WorkerConfig
    cluster: ClusterConfig
    server: ServerConfig
    connections: ConnectionConfig
    record: RecordConfig
    offload: OffloadConfig
    cors: CorsConfig = CorsConfig()
