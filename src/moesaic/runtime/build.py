"""From settings to a worker that can run: reads the checkpoint, sizes the KV cache, joins the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moesaic.config import ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.messages import Layout, WorkerInfo
from moesaic.core.metrics import ExpertStats
from moesaic.core.offload import Offload
from moesaic.core.routing import RowSink
from moesaic.core.stored import COMPRESSED
from moesaic.experts.client import DirectExperts, NoServers, RoutedExperts
from moesaic.experts.connector import Connector
from moesaic.experts.remote import RemoteExperts
from moesaic.kernels.table import Put
from moesaic.kvcache.paged import PagedKV, bytes_per_token
from moesaic.models.checkpoint import Progress
from moesaic.offload.padding import block_pool
from moesaic.policy.fleet.replicas import Replicas
from moesaic.policy.scheduling import minimum_batch
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.microqueue import policy_named
from moesaic.policy.scheduling.schedulers.actions import Scheduler
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.barrier import BarrierScheduler
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.schedulers.ready_queues import RunThreshold
from moesaic.runtime import memory_levels, offloaded, out_of_memory, tracing
from moesaic.runtime.executor import Executor
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.launcher import RankLauncher, of_rank
from moesaic.runtime.model_loading import (
    LoadedModel,
    check_shared,
    context_length,
    kv_type,
    layout_of,
    load_model,
    num_blocks_of,
)
from moesaic.runtime.observer import WorkerObserver
from moesaic.runtime.routing_recorder import recorder
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.recorded import RecordedRunner
from moesaic.runtime.step.running_step import Combine, SegmentRunner
from moesaic.runtime.step.stages import BlockStages
from moesaic.runtime.worker import Journal, Worker
from moesaic.transport.base import Connection
from moesaic.transport.wakeup import Wakeup

URGENT_SECONDS = 0.1
"""Rows of the asynchronous scheduler that waited for longer run first, as in the public code of its paper;
see --queue-urgency."""
LINGER = 0.05
"""Seconds in which a request may follow the last one before the first pass, where a pass reads the model from
a disk: one of the first request alone takes as long as one of all."""
HEAP_SLACK = 1 << 20
"""Bytes of a connection's shared memory beside its rows."""


@out_of_memory.told
def build_worker(
    config: WorkerConfig,
    connection: Connection,
    clock: Callable[[], float],
    progress: Progress | None = None,
    journal: Journal | None = None,
    wakeup: Wakeup | None = None,
    routing: RowSink | None = None,
    lost: Callable[[str], None] | None = None,
) -> tuple[Worker, WorkerInfo]:
    """Load `config`'s model and make the worker at the far end of `connection`.

    bell: rings when a message arrived; needed where the experts are remote. routing: takes the rows' experts.
    lost: hears, from a thread, of another rank of the group that ended; None: the next round will tell.
    Raises ConfigError or CheckpointError, one line each, when something does not fit.
    """
    max_model_len = context_length(config.model)  # before the weights are read: that takes longer
    if config.parallel.tensor_parallel_size > 1:
        return _build_group(config, connection, clock, max_model_len, progress, journal, wakeup, lost)
    if config.offload is not None:
        return _build_offloaded(config, config.offload, connection, clock, max_model_len, progress, journal)
    check_shared(config)
    layout = _tell_layout(config.model, connection) if config.remote_experts else None
    loaded = load_model(config.model, progress, layout, config.most_threads)
    spec, block_size = loaded.model.spec, config.cache.block_size
    kv_dtype = kv_type(config.cache, loaded)
    num_blocks = num_blocks_of(config, loaded, max_model_len, kv_dtype)
    kv = PagedKV(spec.kv, spec.num_layers, num_blocks, block_size, kv_dtype, loaded.device, loaded.kernels)
    scheduling = config.scheduler
    limits = BatchLimits(scheduling.max_num_seqs, scheduling.max_num_batched_tokens, max_model_len)
    blocks = KVBlocks(num_blocks, block_size, config.cache.enable_prefix_caching)
    rows = scheduling.max_num_batched_tokens
    experts: RoutedExperts = DirectExperts(loaded.model.experts, loaded.kernels, rows)
    observer = tracing.observer_of(config.trace, clock)
    recorded = 0 if config.model.enforce_eager else -(-max_model_len // block_size)
    remote: RemoteExperts | None = None
    combine = _combine(scheduling, layout, loaded.device)
    if layout is not None and combine is not None:
        experts = remote = _remote(config, layout, clock, observer, loaded.kernels.put)
    scheduler = _scheduler(config, limits, blocks, layout)
    runner = _runner(loaded, kv, experts, block_size, recorded, combine)
    layered = None if remote is None else LayerwiseRunner(runner, remote)
    seen = recorder(config, spec, routing)
    servers = NoServers() if remote is None else remote
    stats = ExpertStats if remote is None else remote.stats
    parts = loaded.model, runner, loaded.device, connection, servers, layered, seen
    executor = Executor(*parts, observer=observer)
    joined = connection, scheduler, executor, clock, journal, servers, stats, wakeup
    worker = Worker(*joined, observer=observer)
    return worker, _describe(loaded, layout, scheduling, max_model_len, block_size, num_blocks, kv_dtype)


def _runner(
    loaded: LoadedModel,
    kv: PagedKV,
    experts: RoutedExperts,
    block_size: int,
    table_width: int,
    combine: Combine | None,
) -> SegmentRunner:
    """table_width: see RecordedRunner; 0: nothing is recorded. combine: None where a direct call answers."""
    direct = Combine(False, 0, 0, loaded.device)
    stages = BlockStages(loaded.model, kv, block_size, loaded.device, combine or direct)
    eager = EagerRunner(stages, experts)
    if not table_width or loaded.kernels.recorder is None:
        return eager
    return RecordedRunner(eager, loaded.kernels.recorder, table_width, direct=combine is None)


def _build_group(
    config: WorkerConfig,
    connection: Connection,
    clock: Callable[[], float],
    max_model_len: int,
    progress: Progress | None,
    journal: Journal | None,
    wakeup: Wakeup | None,
    lost: Callable[[str], None] | None,
) -> tuple[Worker, WorkerInfo]:
    """The worker that is the first rank of a group of processes, which it starts."""
    build_rank.check(config)
    where = build_rank.placed(config)
    launcher = RankLauncher(config)
    config, scheduling = of_rank(config, 0), config.scheduler
    with launcher.starting():
        group = launcher.gather()
        loaded = build_rank.load_rank(config, group, where, progress)
        kv_dtype = kv_type(config.cache, loaded)
        free = build_rank.least_free(config, group, loaded)
        num_blocks = num_blocks_of(config, loaded, max_model_len, kv_dtype, free)
        group.announce(num_blocks.to_bytes(8, "little"))
        forward = build_rank.join(config, group, where, loaded, num_blocks)
        group.announce(b"")  # all have their memory
    forward.launcher = launcher
    limits = BatchLimits(scheduling.max_num_seqs, scheduling.max_num_batched_tokens, max_model_len)
    offload = config.offload
    padded, rows = (None, None) if offload is None else (offload.padded, offload.logit_rows)
    blocks = block_pool(num_blocks, config.cache.block_size, config.cache.enable_prefix_caching, padded)
    device = loaded.device
    executor = Executor(loaded.model, forward, device, connection, NoServers(), logit_rows=rows)
    scheduler = LockstepScheduler(limits, blocks)
    linger = 0.0 if offload is None else LINGER
    stats = forward.stats
    worker = Worker(
        connection, scheduler, executor, clock, journal, expert_stats=stats, wakeup=wakeup, linger=linger
    )
    block_size = config.cache.block_size
    info = _describe(loaded, None, scheduling, max_model_len, block_size, num_blocks, kv_dtype)
    kv_bytes = group.size * info.kv_bytes
    if lost is not None:
        launcher.when_lost(lost)
    return worker, replace(info, ranks=group.size, collectives=forward.collectives, kv_bytes=kv_bytes)


def _build_offloaded(
    config: WorkerConfig,
    offload: Offload,
    connection: Connection,
    clock: Callable[[], float],
    max_model_len: int,
    progress: Progress | None,
    journal: Journal | None,
) -> tuple[Worker, WorkerInfo]:
    """The worker whose model is larger than its fast memory."""
    offloaded.check(config)
    loaded, layout = offloaded.load(config, offload, progress)
    block_size, scheduling = config.cache.block_size, config.scheduler
    kv_dtype = kv_type(config.cache, loaded)
    num_blocks = num_blocks_of(config, loaded, max_model_len, kv_dtype)
    kv = memory_levels.cache(config, offload, loaded, num_blocks)
    observer = tracing.observer_of(config.trace, clock)
    forward = offloaded.join(config, offload, loaded, layout, kv, observer.pass_ended)
    limits = BatchLimits(scheduling.max_num_seqs, scheduling.max_num_batched_tokens, max_model_len)
    pool = block_pool(num_blocks, block_size, config.cache.enable_prefix_caching, offload.padded)
    scheduler = LockstepScheduler(limits, pool)
    parts = loaded.model, forward, loaded.device, connection, NoServers()
    executor = Executor(*parts, logit_rows=offload.logit_rows, observer=observer)
    stats = forward.stats
    worker = Worker(
        connection, scheduler, executor, clock, journal, None, stats, linger=LINGER, observer=observer
    )
    return worker, _describe(loaded, layout, scheduling, max_model_len, block_size, num_blocks, kv_dtype)


def _scheduler(
    config: WorkerConfig, limits: BatchLimits, blocks: KVBlocks, layout: ExpertLayout | None
) -> Scheduler:
    scheduling, queues = config.scheduler, config.queues
    if scheduling.schedule == "lockstep":
        return LockstepScheduler(limits, blocks, scheduling.inflight_batches)
    if layout is None:
        raise ConfigError.field("--schedule", scheduling.schedule, "lockstep without --expert-servers")
    if scheduling.schedule == "barrier":
        return BarrierScheduler(limits, blocks)
    urgency, history = queues.urgency(URGENT_SECONDS), queues.queue_history
    policy = policy_named(scheduling.queue_policy, urgency, history=history)
    gather = RunThreshold(minimum_batch.rows(layout.num_experts, layout.top_k))
    return AsyncScheduler(limits, blocks, policy, len(layout.layers), layout.top_k, gather)


def _combine(
    scheduling: SchedulerConfig, layout: ExpertLayout | None, device: torch.device
) -> Combine | None:
    partial = scheduling.combine == "partial"
    if layout is not None:
        return Combine(partial, scheduling.max_num_batched_tokens, layout.top_k, device)
    if partial:
        raise ConfigError.field("--combine", "partial", "exact without --expert-servers")
    return None


def _tell_layout(config: ModelConfig, connection: Connection) -> ExpertLayout:
    """Says where the experts lie, before anything slow: the servers can load meanwhile."""
    layout = layout_of(config)
    connection.send(Layout(layout))
    return layout


def _remote(
    config: WorkerConfig,
    layout: ExpertLayout,
    clock: Callable[[], float],
    observer: WorkerObserver,
    put: Put,
) -> RemoteExperts:
    """The servers' client. Shared memory holds two of the largest steps on each connection."""
    rows = config.scheduler.max_num_batched_tokens
    heap = HEAP_SLACK + 2 * 4 * rows * (layout.hidden + layout.top_k * (layout.hidden + 2))
    wakeup = Wakeup()
    connector = Connector(heap, wakeup, config.transport)
    schedule = config.scheduler.schedule
    return RemoteExperts(
        layout,
        Replicas(own=config.own_server),
        connector,
        wakeup,
        clock,
        tell=minimum_batch.rows(layout.num_experts, layout.top_k) if schedule == "async" else None,
        everyone=schedule == "barrier",
        put=put,
        observer=observer,
    )


def _describe(
    loaded: LoadedModel,
    elsewhere: ExpertLayout | None,
    scheduling: SchedulerConfig,
    max_model_len: int,
    block_size: int,
    num_blocks: int,
    kv_dtype: torch.dtype,
) -> WorkerInfo:
    spec = loaded.model.spec
    token_bytes = bytes_per_token(spec.kv, spec.num_layers, kv_dtype)
    return WorkerInfo(
        model_type=spec.model_type,
        device=_device_name(loaded.device),
        kernels=loaded.kernels.name,
        dtype=str(loaded.dtype).removeprefix("torch.") + _compressed(loaded, elsewhere),
        threads=loaded.threads,
        num_parameters=loaded.model.num_parameters + (elsewhere.parameters if elsewhere else 0),
        weight_bytes=loaded.model.num_bytes + (elsewhere.num_bytes if elsewhere else 0),
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_bytes=token_bytes * block_size * num_blocks,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
    )


def _compressed(loaded: LoadedModel, elsewhere: ExpertLayout | None) -> str:
    away = elsewhere is not None and elsewhere.dtype == COMPRESSED
    here = any(weights.compressed_numbers for weights in loaded.model.experts.values())
    return ", experts compressed" if away or here else ""


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
