"""Finds out whether a worker may store prefixes, where, and on what their bits depend.

Question: When is a stored prefix found again, and when is it not?
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

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
from moesaic.runtime.prefix_cache.part import OwnPart, PrefixPart
from moesaic.runtime.prefix_cache.prefixes import PrefixesOnDisk, StoredPrefixes

LOG = logging.getLogger(__name__)


class StoringParts(Protocol):
    """The parts of a worker that stores prefixes."""

    @property
    def memory(self) -> LayerMemory: ...

    @property
    def ranks(self) -> int: ...

    @property
    def stored_root(self) -> bytes | None: ...

    @property
    def share_prefixes(self) -> Callable[[OwnPart], PrefixPart] | None: ...


def compute_root(
    config: WorkerConfig, loaded_model: LoadedModel, kv_dtype: torch.dtype, owners_digest: int = 0
) -> bytes | None:
    """The digest of all that the bits of a KV block depend on, besides its tokens. None: nothing is stored.

    owners_digest: of the experts that each rank of a group has. Raises ConfigError for a model or a device
    whose KV is not stored.
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
        # A sum over ranks has other bits in another order. Where the placement lies changes none.
        *((replace(config.parallel, placement=None), owners_digest) if is_group(config) else ()),
    )
    return hashlib.blake2b(repr(words).encode(), digest_size=DIGEST_BYTES).digest()


def is_group(config: WorkerConfig) -> bool:
    """Whether the worker is a group of ranks, which have a part of each block each."""
    return config.parallel.tensor_parallel_size > 1


def build_prefixes(
    config: WorkerConfig,
    parts: StoringParts,
    max_model_len: int,
    on_read: Callable[[], None] | None,
) -> StoredPrefixes:
    """The prefixes of a worker. Raises ConfigError for a directory that cannot be used."""
    own_part = build_own_part(config, parts.memory, 0, on_read)
    if own_part is None or parts.stored_root is None:
        return StoredPrefixes()
    token_bytes = parts.ranks * own_part.bytes_of_token(config.cache.block_size)
    report_size(token_bytes, max_model_len, config.cache.prefix_cache_bytes, config)
    part = own_part if parts.share_prefixes is None else parts.share_prefixes(own_part)
    return PrefixesOnDisk(part, config.cache.block_size, parts.stored_root)


def build_own_part(
    config: WorkerConfig, memory: LayerMemory, rank: int, on_read: Callable[[], None] | None = None
) -> OwnPart | None:
    """The part of this process, which has this rank if it belongs to a group. None: no prefix is stored.

    Raises ConfigError for a directory that cannot be used.
    """
    directory = config.cache.prefix_cache_dir
    if directory is None:
        return None
    if not isinstance(memory, PagedKV | HybridMemory):
        condition = "nothing where the KV cache is on two levels of memory"
        raise ConfigError.field("--prefix-cache-dir", directory, condition)
    files = EntryFiles(directory, config.cache.prefix_cache_bytes, config.parallel.tensor_parallel_size)
    return OwnPart(memory, files, on_read, rank if is_group(config) else None)


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
