"""The two levels of a model that is larger than its fast memory: RAM over a disk, a GPU over RAM, or, to
compare schedules without one, a core over another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from moesaic.config import CacheConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.kvcache.paged import PagedKV
from moesaic.models import files
from moesaic.offload.arena import Arena
from moesaic.offload.device import DeviceLink, DeviceMemory, Staged, stream_of
from moesaic.offload.lanes import Setup
from moesaic.offload.link import Link
from moesaic.offload.weights import Streamed
from moesaic.policy.offloading.tasks import Lane
from moesaic.runtime.machine import allowed_cpus, stay_on
from moesaic.runtime.model_loading import LoadedModel, kv_type

Core = Callable[[], AbstractContextManager[None]]
"""Within it a thread computes there."""
Owned = Mapping[int, Sequence[int]]
"""Layer -> experts of one process, ascending."""


@dataclass(frozen=True)
class Levels:
    """A process's routed experts on the two levels, and the ways between these."""

    experts: Streamed
    static: Mapping[int, frozenset[int]]
    """Layer -> experts that are always on the fast level."""
    down: Link
    up: Link
    slow: table.Kernels
    """Of the slow processor."""
    staged: bool = False
    """What comes down is put into pinned memory first."""


def levels(
    config: WorkerConfig,
    offload: Offload,
    loaded: LoadedModel,
    layout: ExpertLayout,
    owned: Owned | None = None,
) -> Levels:
    """With the experts that stay read. owned: layer -> the experts of this process; None: all."""
    path = files.resolve(config.model.model, config.model.revision)
    of_layers = owned or {layer: range(layout.num_experts) for layer in layout.layers}
    kept = {layer: list(mine[: offload.static_experts]) for layer, mine in of_layers.items()}
    static = {layer: frozenset(experts) for layer, experts in kept.items()}
    if loaded.device.type == "cuda":
        down, up = DeviceLink(loaded.device), DeviceLink(loaded.device)
        staged = Staged(path, layout, kept, DeviceMemory(loaded.device), down, owned)
        staged.load_static()
        return Levels(staged, static, down, up, slow_kernels(config, loaded), staged=True)
    arena = Arena(max(Streamed.memory_for(path, layout, kept, owned).total, 1 << 12))
    paced, back = Link(offload.link), Link(offload.link)
    link = None if offload.link is None else paced
    streamed = Streamed(path, layout, kept, arena, link=link, owned=owned)
    streamed.load_static()
    return Levels(streamed, static, paced, back, slow_kernels(config, loaded))


def slow_kernels(config: WorkerConfig, loaded: LoadedModel) -> table.Kernels:
    """Of the slow processor: the CPU's, with as many threads as were loaded with."""
    if loaded.device.type == "cpu":
        return loaded.kernels
    kernels = table.pick("cpu", config.model.kernels)
    kernels.set_threads(loaded.threads, False)
    return kernels


def cache(config: WorkerConfig, offload: Offload, loaded: LoadedModel, num_blocks: int) -> PagedKV:
    """Keys and values of all layers, on the level that the policy says, with all the memory that was planned:
    the first pass would wait for it otherwise.

    Raises ConfigError for a type that the processor beside it does not read.
    """
    spec, size, dtype = loaded.model.spec, config.cache.block_size, kv_type(config.cache, loaded)
    device, kernels = loaded.device, loaded.kernels
    if device.type == "cuda" and (offload.slow_attention or offload.slow_cache):
        device, kernels = torch.device("cpu"), slow_kernels(config, loaded)
        named = str(dtype).removeprefix("torch.")
        kv_type(CacheConfig(kv_cache_dtype=named), replace(loaded, kernels=kernels))  # type: ignore[arg-type]
    return PagedKV(spec.kv, spec.num_layers, num_blocks, size, dtype, device, kernels, at_once=True)


def setup_of(offload: Offload, loaded: LoadedModel) -> Setup:
    """What each lane's thread does first."""
    if loaded.device.type == "cuda":
        return partial(_on_stream, loaded.device)
    return partial(on_core, allowed_cpus(), cores_of(offload, loaded.kernels)[1])


def cores_of(offload: Offload, kernels: table.Kernels) -> tuple[Core, Core]:
    """Of the fast and the slow processor: any, unless there are two of them."""
    if offload.link is None:
        return nullcontext, nullcontext
    if kernels.one_core is None:
        raise ConfigError.field("--kernels", kernels.name, "native kernels where lanes are cores")
    cpus = allowed_cpus()
    return partial(kernels.one_core, cpus[0]), partial(kernels.one_core, cpus[-1])


@contextmanager
def on_core(cpus: Iterable[int], slow: Core, lane: Lane) -> Generator[None]:
    """One that the fast processor's thread starts would stay on its core."""
    if lane is not Lane.FAST:
        stay_on(cpus)
    with torch.inference_mode(), slow() if lane is Lane.SLOW else nullcontext():
        yield


@contextmanager
def _on_stream(device: torch.device, lane: Lane) -> Generator[None]:
    """Products are told by the thread that runs the lists, on the stream that it has."""
    with torch.inference_mode(), nullcontext() if lane is Lane.FAST else stream_of(device):
        yield
