"""From settings to a worker that can run: reads the checkpoint, sizes the KV cache, joins the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moesaic.config import SMALL_MODEL, CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.messages import Layout, WorkerInfo
from moesaic.experts.client import DirectExperts, RoutedExperts
from moesaic.experts.connecting import Connector
from moesaic.experts.remote import RemoteExperts
from moesaic.kernels import table
from moesaic.kvcache.paged import PagedKV, bytes_per_token
from moesaic.models import files, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.model import Model
from moesaic.policy.batching import Limits
from moesaic.policy.brain.actions import Brain
from moesaic.policy.brain.asynchronous import Asynchronous
from moesaic.policy.brain.barrier import Barrier
from moesaic.policy.brain.one_process import OneProcess
from moesaic.policy.brain.ready import Gather
from moesaic.policy.kvblocks import KVBlocks
from moesaic.policy.microqueue import policy_named
from moesaic.policy.replicas import Replicas
from moesaic.runtime import traced
from moesaic.runtime.executor import Executor
from moesaic.runtime.forward import Forward
from moesaic.runtime.layered import Layered
from moesaic.runtime.machine import available_memory, cores, keep_freed_memory
from moesaic.runtime.worker import Journal, Worker
from moesaic.transport.base import Connection
from moesaic.transport.bell import Bell

AUTO_SHARE = 0.4
"""Of the memory left after the weights, the most that `--kv-cache-memory auto` takes on a CPU."""
AUTO_SHARE_CUDA = 0.9
"""The same on a GPU, whose memory is the engine's alone."""

URGENT_SECONDS = 0.1
"""Rows of the asynchronous brain that waited for longer run first, as in the public code of its paper."""
GATHER_SHARE = 0.3
"""Of a worker's rows under way, before some go on without the rest: measured, see docs/measurements.md."""
HEAP_SLACK = 1 << 20
"""Bytes of a connection's shared memory beside its rows."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory and what was chosen for it."""

    model: Model
    device: torch.device
    dtype: torch.dtype
    kernels: table.Kernels
    threads: int


def build_worker(
    config: WorkerConfig,
    connection: Connection,
    clock: Callable[[], float],
    progress: Progress | None = None,
    journal: Journal | None = None,
    bell: Bell | None = None,
) -> tuple[Worker, WorkerInfo]:
    """Load `config`'s model and make the worker at the far end of `connection`.

    bell: rings when a message arrived; needed where the experts are remote. Raises ConfigError or
    CheckpointError, one line each, when something does not fit.
    """
    max_model_len = _context_length(config.model)  # before the weights are read: that takes longer
    layout = _tell_layout(config.model, connection) if config.remote_experts else None
    loaded = load_model(config.model, progress, layout, config.most_threads)
    block_size = config.cache.block_size
    kv_dtype = _kv_dtype(config.cache, loaded)
    num_blocks = _num_blocks(config, loaded, max_model_len, kv_dtype)
    spec = loaded.model.spec
    kv = PagedKV(spec.kv, spec.num_layers, num_blocks, block_size, kv_dtype, loaded.device, loaded.kernels)
    scheduler = config.scheduler
    limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, max_model_len)
    blocks = KVBlocks(num_blocks, block_size, config.cache.enable_prefix_caching)
    experts: RoutedExperts = DirectExperts(loaded.model.experts, loaded.kernels)
    trace = traced.timeline(config.trace, clock)
    recorded = 0 if config.model.enforce_eager else -(-max_model_len // block_size)
    layered: Layered | None = None
    if layout is not None:
        experts = remote = _remote(config, layout, clock, trace)
        layered = Layered(loaded.model, remote, kv, block_size, loaded.device)
    brain = _brain(scheduler, limits, blocks, layout)
    apart = layout is not None
    forward = Forward(loaded.model, experts, kv, block_size, loaded.device, recorded, apart)
    make: Callable[..., Executor] = Executor
    if trace is not None:
        brain, make = traced.TracedBrain(brain, trace), partial(traced.TracedExecutor, trace)
    executor = make(loaded.model, forward, loaded.device, connection, experts, layered)
    worker = Worker(connection, brain, executor, clock, journal, experts, bell)
    return worker, _describe(loaded, layout, scheduler, max_model_len, block_size, num_blocks, kv_dtype)


def _brain(
    scheduler: SchedulerConfig, limits: Limits, blocks: KVBlocks, layout: ExpertLayout | None
) -> Brain:
    if scheduler.schedule == "lockstep":
        return OneProcess(limits, blocks, scheduler.inflight_batches)
    if scheduler.schedule == "barrier":
        return Barrier(limits, blocks)
    if layout is None:
        raise ConfigError.field("--schedule", scheduler.schedule, "lockstep without --expert-servers")
    policy = policy_named(scheduler.queue_policy, urgency=URGENT_SECONDS)
    places, top_k, gather = len(layout.layers), layout.top_k, Gather(GATHER_SHARE)
    return Asynchronous(limits, blocks, policy, places, top_k, gather)


def _tell_layout(config: ModelConfig, connection: Connection) -> ExpertLayout:
    """Says where the experts lie, before anything slow: the servers can load meanwhile."""
    device = _device(config)
    path = files.resolve(config.model, config.revision)
    layout = registry.expert_layout(path, table.pick(str(device), config.kernels), str(device), config.dtype)
    connection.send(Layout(layout))
    return layout


def _remote(
    config: WorkerConfig, layout: ExpertLayout, clock: Callable[[], float], trace: traced.Timeline | None
) -> RemoteExperts:
    """The servers' client. Shared memory holds two of the largest steps on each connection."""
    rows = config.scheduler.max_num_batched_tokens
    heap = HEAP_SLACK + 2 * 4 * rows * (layout.hidden + layout.top_k * (layout.hidden + 2))
    bell = Bell()
    connector = Connector(heap, bell, config.transport)
    schedule = config.scheduler.schedule
    make: Callable[..., RemoteExperts] = RemoteExperts
    if trace is not None:
        make = partial(traced.TracedRemote, trace)
    return make(
        layout,
        Replicas(own=config.own_server),
        connector,
        bell,
        clock,
        tell=schedule == "async",
        everyone=schedule == "barrier",
    )


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    elsewhere: ExpertLayout | None = None,
    most_threads: int | None = None,
) -> Loaded:
    """Read the checkpoint onto the device that `config` asks for; `elsewhere`: without these experts.

    most_threads: this process's share of the cores.
    """
    keep_freed_memory()
    device = _device(config)
    kernels = table.pick(str(device), config.kernels)
    path = files.resolve(config.model, config.revision)
    with_experts = elsewhere is None
    model = registry.load(path, kernels, str(device), config.dtype, with_experts, progress)
    num_bytes = model.num_bytes + (0 if elsewhere is None else elsewhere.num_bytes)
    threads = config.threads or (1 if num_bytes < SMALL_MODEL else most_threads or cores())
    kernels.set_threads(threads, config.pin_threads)
    return Loaded(model, device, model.head.dtype, kernels, threads)


def _device(config: ModelConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError.field("--device", "cuda", "cpu (this machine or this build of torch has no CUDA)")
    cuda = config.device == "cuda" or (config.device == "auto" and available)
    return torch.device("cuda" if cuda else "cpu")


def _kv_dtype(config: CacheConfig, loaded: Loaded) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return torch.float32 if loaded.device.type == "cpu" else loaded.dtype
    dtype = registry.DTYPES[config.kv_cache_dtype]
    if dtype not in loaded.kernels.allowed:
        allowed = ", ".join(name for name, one in registry.DTYPES.items() if one in loaded.kernels.allowed)
        raise ConfigError.field(
            "--kv-cache-dtype", config.kv_cache_dtype, f"auto, {allowed} with {loaded.kernels.name} kernels"
        )
    return dtype


def _context_length(config: ModelConfig) -> int:
    limit = registry.read_spec(files.resolve(config.model, config.revision)).max_position
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError.field("--max-model-len", config.max_model_len, f"at most {limit}, the model's own")
    return config.max_model_len


def _num_blocks(config: WorkerConfig, loaded: Loaded, max_model_len: int, kv_dtype: torch.dtype) -> int:
    """Blocks that the KV cache gets. ConfigError if not one request of the maximum length fits."""
    spec, block_size = loaded.model.spec, config.cache.block_size
    block_bytes = block_size * bytes_per_token(spec.kv, spec.num_layers, kv_dtype)
    per_request = -(-max_model_len // block_size)
    if config.cache.kv_cache_memory == "auto":
        budget = _free_memory(loaded.device)
        num_blocks = min(budget // block_bytes, per_request * config.scheduler.max_num_seqs)
    else:
        budget = parse_bytes("--kv-cache-memory", config.cache.kv_cache_memory)
        num_blocks = budget // block_bytes
    if num_blocks < per_request:
        holds = max(0, num_blocks) * block_size
        shorter = f", or a --max-model-len of at most {holds}" if holds > 1 else ""
        raise ConfigError(
            f"--kv-cache-memory: {config.cache.kv_cache_memory} ({budget / 2**20:.0f} MiB) holds "
            f"{holds} tokens, less than one request of the maximum length {max_model_len}; allowed: at least "
            f"{per_request * block_bytes / 2**20:.1f} MiB{shorter}"
        )
    return int(num_blocks)


def _free_memory(device: torch.device) -> int:
    """Bytes that an automatic KV cache may take on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * AUTO_SHARE_CUDA)
    return int(available_memory() * AUTO_SHARE)


def _describe(
    loaded: Loaded,
    elsewhere: ExpertLayout | None,
    scheduler: SchedulerConfig,
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
        dtype=str(loaded.dtype).removeprefix("torch."),
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
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
