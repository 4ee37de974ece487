"""Every setting, frozen and documented field by field. The command line is generated from here.

Question: Where is a flag defined, and how is one added?
"""

from __future__ import annotations

from moesaic.config.cluster import ClusterConfig, ParallelConfig
from moesaic.config.cors import CorsConfig
from moesaic.config.environment import (
    actor_environment,
    admin_key,
    api_key,
    gpus,
    hub_cache,
    one_gpu,
    renderer_environment,
    settings,
    ucx_tls,
    worker_environment,
)
from moesaic.config.expert_server import ExpertServerConfig
from moesaic.config.server import ConnectionConfig, LogConfig, ServerConfig, TraceConfig, resolve_server
from moesaic.config.values import (
    ON_GPUS,
    SMALL_MODEL,
    Align,
    CollectivesBackend,
    Combine,
    Device,
    DispatchName,
    Dtype,
    ExecutorBackend,
    HostTransport,
    KernelName,
    LogLevel,
    MoeCollectives,
    OffloadSchedule,
    QueuePolicyName,
    RelayUse,
    Schedule,
    Transport,
    check_threads,
    parse_bytes,
)
from moesaic.config.worker import (
    CacheConfig,
    ModelConfig,
    OffloadConfig,
    QueueConfig,
    SchedulerConfig,
    WorkerConfig,
)

__all__ = [
    "ON_GPUS",
    "SMALL_MODEL",
    "Align",
    "CacheConfig",
    "ClusterConfig",
    "CollectivesBackend",
    "Combine",
    "ConnectionConfig",
    "CorsConfig",
    "Device",
    "DispatchName",
    "Dtype",
    "ExecutorBackend",
    "ExpertServerConfig",
    "HostTransport",
    "KernelName",
    "LogConfig",
    "LogLevel",
    "ModelConfig",
    "MoeCollectives",
    "OffloadConfig",
    "OffloadSchedule",
    "ParallelConfig",
    "QueueConfig",
    "QueuePolicyName",
    "RelayUse",
    "Schedule",
    "SchedulerConfig",
    "ServerConfig",
    "TraceConfig",
    "Transport",
    "WorkerConfig",
    "actor_environment",
    "admin_key",
    "api_key",
    "check_threads",
    "gpus",
    "hub_cache",
    "one_gpu",
    "parse_bytes",
    "renderer_environment",
    "resolve_server",
    "settings",
    "ucx_tls",
    "worker_environment",
]
