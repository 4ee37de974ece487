"""Finds out whether a worker may store prefixes, where, and on what their bits depend.

Question: When is a stored prefix found again, and when is it not?
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.kernels import native
from moesaic.models import files, fingerprint
from moesaic.models.kvcache.memory import HybridMemory, LayerMemory
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.policy.scheduling.stored_prefixes import DIGEST_BYTES
from moesaic.runtime.model_loading import LoadedModel
from moesaic.runtime.prefix_cache.entry_files import EntryFiles
from moesaic.runtime.prefix_cache.prefixes import PrefixesOnDisk, StoredPrefixes

LOG = logging.getLogger(__name__)


def compute_root(config: WorkerConfig, loaded_model: LoadedModel, kv_dtype: torch.dtype) -> bytes | None:
    """The digest of all that the bits of a KV block depend on, besides its tokens. None: nothing is stored.

    Raises ConfigError for a model or a device whose KV is not stored.
    """
    if config.cache.prefix_cache_dir is None:
        return None
    spec = loaded_model.model.spec
    if loaded_model.device.type != "cpu":
        raise ConfigError.field("--device", str(loaded_model.device), "cpu with --prefix-cache-dir")
    if spec.states is not None and config.offload is not None:
        condition = "nothing with --fast-memory and linear attention or convolutions: no state is kept there"
        raise ConfigError.field("--prefix-cache-dir", config.cache.prefix_cache_dir, condition)
    path = files.resolve(*config.model.source)
    words = (
        *(fingerprint.compute_fingerprint(path), *fingerprint.list_versions(path)),
        *(loaded_model.kernels.name, _native_digest(), torch.__version__),
        *(str(loaded_model.dtype), str(kv_dtype), config.cache.block_size),
        *(
            spec.kv_layers,
            spec.kv,
            spec.states,
            len(spec.state_layers),
            config.remote_experts,
            config.scheduler.combine,
        ),
    )
    return hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BYTES).digest()


def build_prefixes(
    config: WorkerConfig,
    loaded_model: LoadedModel,
    kv_dtype: torch.dtype,
    memory: LayerMemory,
    max_model_len: int,
    on_read: Callable[[], None] | None,
) -> StoredPrefixes:
    """The prefixes of a worker. Raises ConfigError for a directory that cannot be used."""
    root = compute_root(config, loaded_model, kv_dtype)
    if root is None or config.cache.prefix_cache_dir is None:
        return StoredPrefixes()
    if not isinstance(memory, PagedKV | HybridMemory):
        condition = "nothing where the KV cache is on two levels of memory"
        raise ConfigError.field("--prefix-cache-dir", config.cache.prefix_cache_dir, condition)
    limit = config.cache.prefix_cache_bytes
    entry_files = EntryFiles(config.cache.prefix_cache_dir, limit)
    report_size(memory.block_bytes / config.cache.block_size, max_model_len, limit, config)
    return PrefixesOnDisk(memory, config.cache.block_size, root, entry_files, on_read)


def report_size(token_bytes: float, max_model_len: int, limit: int, config: WorkerConfig) -> None:
    """Say in the log how much a prompt takes, and warn of a limit that does not hold one."""
    prompt_bytes = token_bytes * max_model_len
    size = f"{prompt_bytes / 2**20:.1f} MiB, {token_bytes:.0f} bytes for each token of --max-model-len"
    if prompt_bytes > limit:
        problem = f"{config.cache.prefix_cache_disk} holds less than one prompt of {max_model_len} tokens"
        LOG.warning("--prefix-cache-disk: %s, which takes %s", problem, size)
    else:
        LOG.info("--prefix-cache-dir: a prompt of %d tokens takes %s", max_model_len, size)


def _native_digest() -> str:
    """Tells one build of the native kernels from another. Empty if there is none."""
    digest = hashlib.blake2b()
    for file in sorted(Path(native.__file__).parent.glob("_native*.so")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
