"""Decides how much KV cache, and how many states, fit beside a model.

Question: How many KV blocks does a worker have?
"""

from __future__ import annotations

import torch

from moesaic.config import CacheConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.models import files, registry
from moesaic.models.kvcache.memory import CacheSize
from moesaic.models.kvcache.paged_kv import bytes_per_token
from moesaic.models.kvcache.states import state_bytes
from moesaic.models.shard import Shard
from moesaic.models.spec import ModelSpec
from moesaic.offload.padding import PaddedBlocks
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.stateblocks import StateBlocks
from moesaic.runtime.machine import available_memory, describe_total_memory, total_memory
from moesaic.runtime.model_loading import LoadedModel, select_device
from moesaic.runtime.quick_fit import AUTO_SHARE as AUTO_SHARE

AUTO_SHARE_CUDA = 0.9
"""`AUTO_SHARE` on a GPU, whose memory no other program uses."""


def check_memory(config: WorkerConfig, max_model_len: int) -> None:
    """Refuse a KV cache that cannot fit, before anything of its size or of the context's is allocated.

    `compute_cache_size` checks again, with the memory that the weights leave. Raises ConfigError for a
    cache that is larger than the machine's memory, or too small for one request of the maximum length.
    """
    device = select_device(config.model)
    path = files.resolve(*config.model.source)
    spec = registry.read_spec(path, Shard(0, config.parallel.tensor_parallel_size))
    # The dtype of a model on a GPU is not known before it is loaded. The smallest refuses nothing that
    # fits.
    smallest = "float32" if device.type == "cpu" else "bfloat16"
    dtype_name = smallest if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    _size(config, spec, device, max_model_len, registry.CACHE_DTYPES[dtype_name], None)


def compute_cache_size(
    config: WorkerConfig,
    loaded_model: LoadedModel,
    max_model_len: int,
    kv_dtype: torch.dtype,
    free: int | None = None,
) -> CacheSize:
    """How many KV blocks and states fit.

    free: bytes that an automatic cache may take; None: what is free now. Raises ConfigError if one request of
    the maximum length does not fit.
    """
    return _size(config, loaded_model.model.spec, loaded_model.device, max_model_len, kv_dtype, free)


def bytes_of_request(config: WorkerConfig, spec: ModelSpec, kv_dtype: torch.dtype, tokens: int) -> int:
    """Bytes of a cache that holds one request of so many tokens, and nothing else."""
    block_size = config.cache.block_size
    block_bytes = block_size * bytes_per_token(spec.kv, spec.kv_layers, kv_dtype)
    return -(-tokens // block_size) * block_bytes + _least_states(config, spec)


def count_tokens(config: WorkerConfig, spec: ModelSpec, kv_dtype: torch.dtype, num_bytes: int) -> int:
    """Tokens of the longest request that a cache of so many bytes holds."""
    block_size = config.cache.block_size
    block_bytes = block_size * bytes_per_token(spec.kv, spec.kv_layers, kv_dtype)
    num_blocks = max(0, num_bytes - _least_states(config, spec)) // block_bytes
    # What is left over beside the blocks may hold another snapshot, which then takes some of them.
    while num_blocks and _states(config, spec, num_bytes - num_blocks * block_bytes)[2] > (
        num_bytes - num_blocks * block_bytes
    ):
        num_blocks -= 1
    return num_blocks * block_size


def _least_states(config: WorkerConfig, spec: ModelSpec) -> int:
    """The least bytes beside KV blocks that are enough for the states which they give room to."""
    num_bytes = 0
    while (state_bytes_needed := _states(config, spec, num_bytes)[2]) > num_bytes:
        num_bytes = state_bytes_needed
    return num_bytes


def make_block_pool(
    cache: CacheConfig,
    size: CacheSize,
    padded_tokens: int | None = None,
    stored_root: bytes | None = None,
) -> KVBlocks:
    """A worker's pool. padded_tokens: tokens that each prompt is padded to; None means no padding.
    stored_root: the digest before first blocks, where prefixes are stored."""
    arguments = size.num_blocks, cache.block_size, cache.enable_prefix_caching
    if size.seats:
        return StateBlocks(*arguments, size.seats, size.snapshots, stored_root)
    if padded_tokens is not None:
        return PaddedBlocks(*arguments, padded_tokens)
    return KVBlocks(*arguments, stored_root=stored_root)


def _size(
    config: WorkerConfig,
    spec: ModelSpec,
    device: torch.device,
    max_model_len: int,
    kv_dtype: torch.dtype,
    free: int | None,
) -> CacheSize:
    block_size, ranks = config.cache.block_size, config.parallel.tensor_parallel_size
    block_bytes = block_size * bytes_per_token(spec.kv, spec.kv_layers, kv_dtype)
    per_request = -(-max_model_len // block_size)
    automatic = config.cache.kv_cache_memory == "auto"
    if automatic:
        budget = free_memory(device) if free is None else free
        if device.type == "cpu":  # ranks share a CPU's memory; each has its own GPU
            budget //= ranks
    else:
        budget = parse_cache_memory(config, device) // ranks
    seats, snapshots, state_room = _states(config, spec, budget - per_request * block_bytes)
    left = max(0, budget - state_room)
    num_blocks = (
        config.automatic_blocks(left, block_bytes, max_model_len) if automatic else left // block_bytes
    )
    if num_blocks < per_request:
        num_tokens = max(0, num_blocks) * block_size
        shorter = f", or a --max-model-len of at most {num_tokens}" if num_tokens > 1 else ""
        raise ConfigError(
            f"--kv-cache-memory: {config.cache.kv_cache_memory} ({budget / 2**20:.0f} MiB) holds "
            f"{num_tokens} tokens, less than one request of the maximum length {max_model_len}; allowed: "
            f"at least {(per_request * block_bytes + state_room) / 2**20:.1f} MiB{shorter}"
        )
    return CacheSize(int(num_blocks), seats, snapshots)


def _states(config: WorkerConfig, spec: ModelSpec, budget: int) -> tuple[int, int, int]:
    """Seats and snapshots of a model with states, and the bytes of both: at least one seat.

    budget: bytes beside the KV blocks of one request of the maximum length.
    """
    if spec.states is None:
        return 0, 0, 0
    page, seat = state_bytes(spec.states, len(spec.state_layers))
    seats, snapshots = config.state_room(budget, page, seat)
    return seats, snapshots, seats * seat + (1 + seats + snapshots) * page


def parse_cache_memory(config: WorkerConfig, device: torch.device) -> int:
    """The bytes of --kv-cache-memory. Raises ConfigError if they are more than all memory of the machine."""
    num_bytes = parse_bytes("--kv-cache-memory", config.cache.kv_cache_memory)
    max_bytes, source = total_memory(), describe_total_memory()
    if device.type == "cuda":  # the cache is in the GPUs' memory, or in RAM where the plan says so
        gpu_bytes = torch.cuda.mem_get_info(device)[1] * config.parallel.tensor_parallel_size
        max_bytes, source = max((max_bytes, source), (gpu_bytes, "the memory of the GPUs"))
    if num_bytes > max_bytes:
        allowed_text = f"at most {max_bytes / 2**30:.1f}GiB, {source}"
        raise ConfigError.field("--kv-cache-memory", config.cache.kv_cache_memory, allowed_text)
    return num_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that an automatic KV cache may take on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * AUTO_SHARE_CUDA)
    return int(available_memory() * AUTO_SHARE)
