"""Tells cheaply, and without torch, that a model fits into memory with its longest requests."""

from __future__ import annotations

from moesaic.config import ClusterConfig, WorkerConfig
from moesaic.core.errors import MoesaicError
from moesaic.cost.reading import read
from moesaic.models import files
from moesaic.models.gguf.pairs import list_pairs
from moesaic.runtime.machine import available_memory

MOST_GROWTH = 2
"""Bytes of weights in memory for each byte of the files, at most: 16 bits become float32."""
MOST_WIDENING = 13
"""The same of quantised weights with kernels that make them float32, or with some that are converted: those
of Q2_K have 2.6 bits."""
WIDENING_KERNELS = ("reference", "amx_bf16")
"""How the names of such kernels begin."""
PROCESS_BYTES = 1 << 30
"""More than a process has of libraries and rows."""
AUTO_SHARE = 0.4
"""Share of the memory left after the weights that `--kv-cache-memory auto` takes on a CPU, unless one request
needs more."""


def resolve_processes(config: WorkerConfig, cluster: ClusterConfig | None) -> ClusterConfig:
    """The processes of `cluster`; None: one worker with the ranks of `config`."""
    if cluster is None:
        return ClusterConfig(tensor_parallel_size=config.parallel.tensor_parallel_size)
    return cluster.resolve()


def count_processes(cluster: ClusterConfig) -> int:
    """The number of workers, their ranks and expert servers."""
    workers = cluster.attention_workers + cluster.prefill_workers
    return workers * cluster.tensor_parallel_size + cluster.expert_servers


def bound_bytes(config: WorkerConfig, cluster: ClusterConfig) -> int:
    """Bytes that weights, libraries and rows take at most, in all processes of a resolved `cluster`.

    Raises MoesaicError for a model that cannot be read.
    """
    path = files.resolve(*config.model.source)
    weight_files = [
        file for file in files.model_files(path) if file.suffix in files.WEIGHTS and file.is_file()
    ]
    is_widened = "quantization_config" in files.read_config(path) and (
        config.model.kernels.startswith(WIDENING_KERNELS) or bool(list_pairs(path))
    )
    growth = MOST_WIDENING if is_widened else MOST_GROWTH
    workers = cluster.attention_workers + cluster.prefill_workers
    weights = workers * growth * sum(file.stat().st_size for file in weight_files)
    return weights + count_processes(cluster) * PROCESS_BYTES


def surely_fits(config: WorkerConfig, cluster: ClusterConfig | None = None) -> bool:
    """Whether `fitting.fit` would certainly change nothing. False: only headers of the files tell."""
    cluster = resolve_processes(config, cluster)
    path = files.resolve(*config.model.source)
    workers = cluster.attention_workers + cluster.prefill_workers
    try:
        config_json = files.read_config(path)
        raw = {key: value for key, value in config_json.items() if key != "quantization_config"}
        sizes = read(raw, config.model.model)
        left = available_memory() - bound_bytes(config, cluster)
    except MoesaicError:
        return False  # the loader says what is wrong
    if config.cache.kv_cache_memory != "auto" or left <= 0:
        return False
    longest = config.model.max_model_len or raw.get("max_position_embeddings", 1 << 40)
    if not isinstance(longest, int):
        return False
    cache = workers * (longest * sizes.layers * sizes.cache(1, 4.0) + sizes.seat + 2 * sizes.page)
    return bool(cache <= AUTO_SHARE * left)
