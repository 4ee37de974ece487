"""Loads a model and decides how much KV cache fits beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.config import SMALL_MODEL, CacheConfig, ModelConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.kernels import table
from moesaic.kvcache.paged import bytes_per_token
from moesaic.models import files, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.model import Model
from moesaic.models.shard import WHOLE, Shard
from moesaic.models.spec import ModelSpec
from moesaic.runtime.machine import (
    available_memory,
    cores,
    keep_freed_memory,
    return_freed_memory,
    total_memory,
)

AUTO_SHARE = 0.4
"""Share of the memory left after the weights that `--kv-cache-memory auto` takes on a CPU, at most."""
AUTO_SHARE_CUDA = 0.9
"""The same share on a GPU, whose memory no other program uses."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and the device, dtype, kernels and threads that were chosen for it."""

    model: Model
    device: torch.device
    dtype: torch.dtype
    kernels: table.Kernels
    threads: int


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    elsewhere: ExpertLayout | None = None,
    most_threads: int | None = None,
    shard: Shard = WHOLE,
    own_memory: bool = False,
) -> LoadedModel:
    """Read the checkpoint onto the device that `config` names.

    elsewhere: routed experts that are not read. most_threads: this process's share of the cores. shard: the
    attention heads that are read. own_memory: copy the files instead of mapping them, and return freed memory
    to the system, since memory is short.
    """
    (return_freed_memory if own_memory else keep_freed_memory)()
    device = device_of(config)
    kernels = table.pick(str(device), config.kernels)
    path = files.resolve(config.model, config.revision)
    with_experts = elsewhere is None
    mapped = config.mmap and not own_memory
    model = registry.load(
        path,
        kernels,
        str(device),
        config.dtype,
        with_experts,
        progress,
        shard,
        mapped,
        config.max_model_len,
    )
    num_bytes = model.num_bytes + (0 if elsewhere is None else elsewhere.num_bytes)
    threads = config.threads or (1 if num_bytes < SMALL_MODEL else most_threads or cores())
    kernels.set_threads(threads, config.pin_threads)
    return LoadedModel(model, device, model.head.dtype, kernels, threads)


def device_of(config: ModelConfig) -> torch.device:
    """The device that --device selects. Raises ConfigError for cuda where torch has no CUDA."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError.field("--device", "cuda", "cpu (this machine or this build of torch has no CUDA)")
    cuda = config.device == "cuda" or (config.device == "auto" and available)
    return torch.device("cuda" if cuda else "cpu")


def gpus_of(config: ModelConfig) -> int:
    """The number of GPUs that this process sees; 0 if the model computes on a CPU."""
    return torch.cuda.device_count() if device_of(config).type == "cuda" else 0


def check_shared(config: WorkerConfig) -> None:
    """Refuse an automatic KV cache on a GPU that processes share.

    Raises ConfigError where another process may load into the GPU while this one measures what is free.
    """
    gpus = gpus_of(config.model)
    shared = gpus > 0 and (config.beside > 0 or config.parallel.tensor_parallel_size > gpus)
    if shared and config.cache.kv_cache_memory == "auto":
        raise ConfigError.field(
            "--kv-cache-memory", "auto", "a size, such as 4GiB, where several processes share a GPU"
        )


def layout_of(config: ModelConfig) -> ExpertLayout:
    """Where the checkpoint has its routed experts, for the kernels and the device that `config` names."""
    device, path = str(device_of(config)), files.resolve(config.model, config.revision)
    return registry.expert_layout(path, table.pick(device, config.kernels), device, config.dtype)


def kv_type(config: CacheConfig, loaded: LoadedModel) -> torch.dtype:
    """The dtype of the KV cache. Raises ConfigError for one that the kernels cannot read."""
    if config.kv_cache_dtype == "auto":
        return torch.float32 if loaded.device.type == "cpu" else loaded.dtype
    dtype = registry.CACHE_DTYPES[config.kv_cache_dtype]
    if dtype not in loaded.kernels.cached:
        allowed = ", ".join(
            name for name, one in registry.CACHE_DTYPES.items() if one in loaded.kernels.cached
        )
        raise ConfigError.field(
            "--kv-cache-dtype", config.kv_cache_dtype, f"auto, {allowed} with {loaded.kernels.name} kernels"
        )
    return dtype


def context_length(config: ModelConfig) -> int:
    """Maximum tokens of a request. Raises ConfigError if --max-model-len is above the model's own."""
    limit = registry.read_spec(files.resolve(config.model, config.revision)).max_position
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError.field("--max-model-len", config.max_model_len, f"at most {limit}, the model's own")
    return config.max_model_len


def check_memory(config: WorkerConfig, max_model_len: int) -> None:
    """Refuse a KV cache that cannot fit, before anything of its size or of the context's is allocated.

    `num_blocks_of` checks again, with the memory that the weights leave. Raises ConfigError for a cache that
    is larger than the machine's memory, or too small for one request of the maximum length.
    """
    device = device_of(config.model)
    path = files.resolve(config.model.model, config.model.revision)
    spec = registry.read_spec(path, Shard(0, config.parallel.tensor_parallel_size))
    smallest = "float32" if device.type == "cpu" else "bfloat16"
    named = smallest if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    _num_blocks(config, spec, device, max_model_len, registry.CACHE_DTYPES[named], None)


def num_blocks_of(
    config: WorkerConfig,
    loaded: LoadedModel,
    max_model_len: int,
    kv_dtype: torch.dtype,
    free: int | None = None,
) -> int:
    """The number of blocks of the KV cache.

    free: bytes that an automatic cache may take; None: what is free now. Raises ConfigError if one request of
    the maximum length does not fit.
    """
    return _num_blocks(config, loaded.model.spec, loaded.device, max_model_len, kv_dtype, free)


def _num_blocks(
    config: WorkerConfig,
    spec: ModelSpec,
    device: torch.device,
    max_model_len: int,
    kv_dtype: torch.dtype,
    free: int | None,
) -> int:
    block_size, ranks = config.cache.block_size, config.parallel.tensor_parallel_size
    block_bytes = block_size * bytes_per_token(spec.kv, spec.num_layers, kv_dtype)
    per_request = -(-max_model_len // block_size)
    if config.cache.kv_cache_memory == "auto":
        budget = free_memory(device) if free is None else free
        if device.type == "cpu":  # ranks share a CPU's memory; each has its own GPU
            budget //= ranks
        num_blocks = config.automatic_blocks(budget, block_bytes, max_model_len)
    else:
        budget = _given_bytes(config, device) // ranks
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


def _given_bytes(config: WorkerConfig, device: torch.device) -> int:
    """The bytes of --kv-cache-memory. Raises ConfigError if they are more than all memory of the machine."""
    given = parse_bytes("--kv-cache-memory", config.cache.kv_cache_memory)
    most = total_memory()
    if device.type == "cuda":  # the cache is in the GPUs' memory, or in RAM where the plan says so
        most = max(most, torch.cuda.mem_get_info(device)[1] * config.parallel.tensor_parallel_size)
    if given > most:
        allowed = f"at most {most / 2**30:.1f}GiB, the memory of this machine"
        raise ConfigError.field("--kv-cache-memory", config.cache.kv_cache_memory, allowed)
    return given


def free_memory(device: torch.device) -> int:
    """Bytes that an automatic KV cache may take on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * AUTO_SHARE_CUDA)
    return int(available_memory() * AUTO_SHARE)
