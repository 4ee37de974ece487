"""Loads a model as its settings say."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.config import SMALL_MODEL, CacheConfig, ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.weight_types import BLOCK_TYPES, split_dtype
from moesaic.kernels import table
from moesaic.kernels.matrix import number_dtype
from moesaic.models import files, registry
from moesaic.models.checkpoint import Claims, Progress
from moesaic.models.model import Model
from moesaic.models.shard import WHOLE, Shard
from moesaic.runtime.machine import (
    cores,
    keep_freed_memory,
    return_freed_memory,
)

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and the device, dtype, kernels and threads that were chosen for it."""

    model: Model
    device: torch.device
    dtype: torch.dtype
    """Type of the numbers of the LM head, float32 if it is quantised."""
    kernels: table.Kernels
    threads: int


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    expert_layout: ExpertLayout | None = None,
    most_threads: int | None = None,
    shard: Shard = WHOLE,
    own_memory: bool = False,
    predicting: bool = False,
) -> LoadedModel:
    """Read the checkpoint onto the device that `config` names.

    expert_layout: routed experts that are not read. most_threads: this process's share of the cores. shard:
    the attention heads that are read. own_memory: copy the files instead of mapping them, and return freed
    memory to the system, since memory is short. predicting: also read the layer that predicts the token after
    the next one.
    """
    (return_freed_memory if own_memory else keep_freed_memory)()
    device = select_device(config)
    kernels = table.pick(str(device), config.kernels)
    path = files.resolve(*config.source)
    with_experts = expert_layout is None
    use_mmap = config.mmap and not own_memory
    model = registry.load(
        path,
        kernels,
        str(device),
        config.dtype,
        with_experts,
        progress,
        shard,
        use_mmap,
        config.max_model_len,
        predicting,
    )
    if shard.rank == 0:
        _warn_of_conversion(path, kernels, str(device))
    num_bytes = model.num_bytes + (0 if expert_layout is None else expert_layout.num_bytes)
    threads = config.threads or (1 if num_bytes < SMALL_MODEL else most_threads or cores())
    kernels.set_threads(threads, config.pin_threads)
    return LoadedModel(model, device, number_dtype(model.head), kernels, threads)


def _warn_of_conversion(path: Path, kernels: table.Kernels, device: str) -> None:
    """Says in one line that weights in blocks are converted, if the kernels do not read them."""
    raw_config = files.read_config(path)
    if not registry.is_quantised(raw_config):
        return
    file_type = registry.stored_type(raw_config, path, Claims(path))
    type_in_memory = registry.type_in_memory(file_type, device, kernels)
    if any(name in BLOCK_TYPES for name in split_dtype(file_type)) and type_in_memory != file_type:
        LOG.warning(
            "%s kernels read no weights in blocks: %s is converted to %s, in memory of this process",
            kernels.name,
            file_type,
            type_in_memory,
        )


def select_device(config: ModelConfig) -> torch.device:
    """The device that --device selects. Raises ConfigError for cuda where torch has no CUDA."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError.field("--device", "cuda", "cpu (this machine or this build of torch has no CUDA)")
    cuda = config.device == "cuda" or (config.device == "auto" and available)
    return torch.device("cuda" if cuda else "cpu")


def maps_files(config: ModelConfig) -> bool:
    """Whether the model is computed from the mapped files. Otherwise they are copied when it is loaded."""
    return config.mmap and select_device(config).type == "cpu"


def count_gpus(config: ModelConfig) -> int:
    """The number of GPUs that this process sees; 0 if the model computes on a CPU."""
    return torch.cuda.device_count() if select_device(config).type == "cuda" else 0


def check_gpu_sharing(config: WorkerConfig) -> None:
    """Refuse an automatic KV cache on a GPU that processes share.

    Raises ConfigError where another process may load into the GPU while this one measures what is free.
    """
    gpus = count_gpus(config.model)
    is_shared = gpus > 0 and (config.beside > 0 or config.parallel.tensor_parallel_size > gpus)
    if is_shared and config.cache.kv_cache_memory == "auto":
        raise ConfigError.field(
            "--kv-cache-memory", "auto", "a size, such as 4GiB, where several processes share a GPU"
        )


def read_expert_layout(config: ModelConfig, predicting: bool = False) -> ExpertLayout:
    """Where the checkpoint has its routed experts, for the kernels and the device that `config` names.

    predicting: with those of the layer that predicts the token after the next one.
    """
    device, path = str(select_device(config)), files.resolve(*config.source)
    kernels = table.pick(device, config.kernels)
    return registry.expert_layout(path, kernels, device, config.dtype, predicting)


def choose_kv_dtype(config: CacheConfig, loaded_model: LoadedModel) -> torch.dtype:
    """The dtype of the KV cache. Raises ConfigError for one that the kernels cannot read."""
    if config.kv_cache_dtype == "auto":
        return torch.float32 if loaded_model.device.type == "cpu" else loaded_model.dtype
    dtype = registry.CACHE_DTYPES[config.kv_cache_dtype]
    if dtype not in loaded_model.kernels.cache_dtypes:
        allowed_names = ", ".join(
            name
            for name, cache_dtype in registry.CACHE_DTYPES.items()
            if cache_dtype in loaded_model.kernels.cache_dtypes
        )
        raise ConfigError.field(
            "--kv-cache-dtype",
            config.kv_cache_dtype,
            f"auto, {allowed_names} with {loaded_model.kernels.name} kernels",
        )
    return dtype


def context_length(config: ModelConfig) -> int:
    """Maximum tokens of a request. Raises ConfigError if --max-model-len is above the model's own."""
    limit = registry.read_spec(files.resolve(*config.source)).max_position
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError.field("--max-model-len", config.max_model_len, f"at most {limit}, the model's own")
    return config.max_model_len
