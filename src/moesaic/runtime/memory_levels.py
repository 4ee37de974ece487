"""The two memory levels of a model that is larger than its fast memory.

They are RAM and a disk, or a GPU's memory and RAM. Two cores can stand for the two levels, to compare
schedules without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moesaic.config import CacheConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.models import files
from moesaic.models.conversion import conversion_of
from moesaic.models.headers import Headers
from moesaic.models.kvcache.elastic_kv import ElasticKV
from moesaic.models.kvcache.memory import CacheSize, HybridMemory, LayerMemory
from moesaic.models.kvcache.paged_kv import PagedKV, SplitKV
from moesaic.models.kvcache.states import StateCache
from moesaic.models.spec import ModelSpec
from moesaic.offload.arena import Arena
from moesaic.offload.by_expert import StreamedByExpert
from moesaic.offload.converted_experts import StreamedConvertedExperts
from moesaic.offload.device import DeviceLink, DeviceMemory, StagedExperts, stream_of
from moesaic.offload.elastic_experts import ElasticConvertedExperts, ElasticExperts
from moesaic.offload.lanes import Setup
from moesaic.offload.link import Link
from moesaic.offload.operations import Exchanges
from moesaic.offload.paged_experts import PagedExperts
from moesaic.offload.weights import StreamedExperts
from moesaic.policy.offloading.residency import choose_residents
from moesaic.policy.offloading.tasks import Lane
from moesaic.runtime.divided_memory import DividedMemory
from moesaic.runtime.hot_list import HotList, open_list
from moesaic.runtime.machine import allowed_cpus, stay_on
from moesaic.runtime.model_loading import LoadedModel, choose_kv_dtype

Core = Callable[[], AbstractContextManager[None]]
"""A context in which the calling thread computes on one core."""
OwnedExperts = Mapping[int, Sequence[int]]
"""Layer -> the experts of one process, ascending."""
CHOOSING_SCHEDULES = ("on-demand", "in-place", "split")
"""Schedules in which decode steps load chosen experts or none. On a GPU each expert then has a place, as
experts that are converted have with every schedule."""


@dataclass(frozen=True)
class Levels:
    """A process's routed experts on the two levels, and the links between the levels."""

    experts: StreamedExperts
    static: Mapping[int, frozenset[int]]
    """Layer -> the experts that always stay on the fast level."""
    down_link: Link
    up_link: Link
    slow: table.Kernels
    """The kernels of the slow level's processor."""
    exchanges: Exchanges | None = None
    """Changes which experts stay. None: always the same stay."""
    hot_list: HotList = field(kw_only=True)
    """How often earlier runs chose each expert."""
    is_staged: bool = False
    """True: what is loaded goes through pinned memory."""

    @property
    def num_listed(self) -> int:
        """Experts that stay because the list has counts of their layer."""
        return sum(len(experts) for layer, experts in self.static.items() if layer in self.hot_list.counts)


@dataclass(frozen=True)
class Caches:
    """What the layers of a model larger than the fast memory keep of sequences."""

    kv: PagedKV
    states: StateCache | None
    fast: PagedKV | None = None
    """The first blocks of the KV cache, on the fast level, where the others are on the slow one."""

    def memory(self, spec: ModelSpec) -> LayerMemory:
        """All of them as one memory."""
        if self.fast is not None:
            return SplitKV(self.fast, self.kv)
        if self.states is None:
            return self.kv
        return HybridMemory(self.kv, self.states, spec.state_layers, spec.num_layers)


def build_levels(
    config: WorkerConfig,
    offload: Offload,
    loaded_model: LoadedModel,
    layout: ExpertLayout,
    owned_experts: OwnedExperts | None = None,
    division_plan: DividedMemory | None = None,
) -> Levels:
    """Make the levels and read the experts that stay on the fast one.

    owned_experts: layer -> the experts of this process; None: all. division_plan: how memory may be divided
    between steps, on a CPU over a disk; None: it stays as it is.
    """
    path = files.resolve(*config.model.source)
    experts_by_layer = owned_experts or {layer: range(layout.num_experts) for layer in layout.layers}
    hot_list = open_list(offload.hot_experts, path, layout)
    static_lists = {
        layer: choose_residents(own_experts, hot_list.counts.get(layer, []), offload.static_experts)
        for layer, own_experts in experts_by_layer.items()
    }
    static = {layer: frozenset(experts) for layer, experts in static_lists.items()}
    if loaded_model.device.type == "cuda":
        memory = DeviceMemory(loaded_model.device)
        down_link, up_link = DeviceLink(loaded_model.device), DeviceLink(loaded_model.device)
        if offload.schedule in CHOOSING_SCHEDULES or conversion_of(Headers(path), layout) is not None:
            paged_experts = PagedExperts(path, layout, static_lists, memory, down_link, owned_experts)
            paged_experts.load_static()
            down_link.finish()
            exchanges = paged_experts if offload.hot else None
            static, kernels = paged_experts.static, slow_kernels(config, loaded_model)
            return Levels(paged_experts, static, down_link, up_link, kernels, exchanges, hot_list=hot_list)
        staged_experts = StagedExperts(path, layout, static_lists, memory, down_link, owned_experts)
        staged_experts.load_static()
        kernels = slow_kernels(config, loaded_model)
        return Levels(staged_experts, static, down_link, up_link, kernels, is_staged=True, hot_list=hot_list)
    if division_plan is not None:
        return _build_elastic_levels(config, loaded_model, layout, static_lists, division_plan, hot_list)
    kind: type[StreamedExperts] = StreamedByExpert if offload.hot else StreamedExperts
    if conversion_of(Headers(path), layout) is not None:
        kind = StreamedConvertedExperts
    arena = Arena(max(kind.memory_for(path, layout, static_lists, owned_experts).total, 1 << 12))
    links = Link(offload.link), Link(offload.link)
    link = None if offload.link is None else links[0]
    streamed_experts = kind(path, layout, static_lists, arena, link=link, owned_experts=owned_experts)
    streamed_experts.load_static()
    kernels = slow_kernels(config, loaded_model)
    if offload.hot and isinstance(streamed_experts, StreamedByExpert):
        experts = streamed_experts
        return Levels(experts, experts.static, *links, kernels, experts, hot_list=hot_list)
    return Levels(streamed_experts, static, *links, kernels, hot_list=hot_list)


def _build_elastic_levels(
    config: WorkerConfig,
    loaded_model: LoadedModel,
    layout: ExpertLayout,
    static_lists: Mapping[int, Sequence[int]],
    division_plan: DividedMemory,
    hot_list: HotList,
) -> Levels:
    """The levels where experts give way to the KV cache. static_lists: the experts that stay first."""
    path, divisions = files.resolve(*config.model.source), division_plan.divisions
    converts = conversion_of(Headers(path), layout) is not None
    kind = ElasticConvertedExperts if converts else ElasticExperts
    places = divisions[0].residents, divisions[-1].residents
    experts = kind(path, layout, static_lists, *places, division_plan.page)
    experts.load_static()
    links, kernels = (Link(), Link()), slow_kernels(config, loaded_model)
    return Levels(experts, experts.static, *links, kernels, experts, hot_list=hot_list)


def slow_kernels(config: WorkerConfig, loaded_model: LoadedModel) -> table.Kernels:
    """The CPU's kernels, with the number of threads that the model was loaded with.

    Beside Triton's kernels they are the fastest of the CPU.
    """
    if loaded_model.device.type == "cpu":
        return loaded_model.kernels
    kernel_name = config.model.kernels
    kernels = table.pick("cpu", "auto" if kernel_name == "triton" else kernel_name)
    kernels.set_threads(loaded_model.threads, False)
    return kernels


def build_caches(
    config: WorkerConfig,
    offload: Offload,
    loaded_model: LoadedModel,
    size: CacheSize,
    division_plan: DividedMemory | None = None,
) -> Caches:
    """What all layers keep: the KV cache on the levels that the policy names, and states on the fast one.

    division_plan: how memory may be divided between steps. None: the cache keeps its memory.

    All of the KV cache's memory is allocated here, so the first pass does not wait for it. Raises ConfigError
    for a dtype that the kernels of that level cannot read.
    """
    spec, block_size, dtype = (
        loaded_model.model.spec,
        config.cache.block_size,
        choose_kv_dtype(config.cache, loaded_model),
    )
    device, kernels = loaded_model.device, loaded_model.kernels
    if device.type == "cuda" and (offload.slow_attention or offload.slow_cache):
        device, kernels = torch.device("cpu"), slow_kernels(config, loaded_model)
        dtype_name = str(dtype).removeprefix("torch.")
        choose_kv_dtype(CacheConfig(kv_cache_dtype=dtype_name), replace(loaded_model, kernels=kernels))  # type: ignore[arg-type]
    blocks = size.num_blocks
    fast = math.floor((1 - offload.slow_cache) * blocks) if 0 < offload.slow_cache < 1 else 0
    if division_plan is not None:
        kv: PagedKV = ElasticKV(
            spec.kv, spec.kv_layers, blocks, block_size, dtype, kernels, division_plan.page
        )
    else:
        kv = PagedKV(
            spec.kv, spec.kv_layers, blocks - fast, block_size, dtype, device, kernels, allocate_now=True
        )
    if fast:
        device_and_kernels = loaded_model.device, loaded_model.kernels
        return Caches(
            kv,
            None,
            PagedKV(spec.kv, spec.kv_layers, fast, block_size, dtype, *device_and_kernels, allocate_now=True),
        )
    if spec.states is None:
        return Caches(kv, None)
    layers = len(spec.state_layers)
    return Caches(kv, StateCache(spec.states, layers, size.seats, size.snapshots, loaded_model.device))


def make_lane_setup(offload: Offload, loaded_model: LoadedModel) -> Setup:
    """The context in which each lane's thread runs."""
    if loaded_model.device.type == "cuda":
        return partial(_on_stream, loaded_model.device)
    return partial(on_core, allowed_cpus(), choose_cores(offload, loaded_model.kernels)[1])


def choose_cores(offload: Offload, kernels: table.Kernels) -> tuple[Core, Core]:
    """The cores of the fast and the slow level. Any core, unless two cores stand for the levels."""
    if offload.link is None:
        return nullcontext, nullcontext
    if kernels.one_core is None:
        raise ConfigError.field("--kernels", kernels.name, "native kernels where lanes are cores")
    cpus = allowed_cpus()
    return partial(kernels.one_core, cpus[0]), partial(kernels.one_core, cpus[-1])


@contextmanager
def on_core(cpus: Iterable[int], slow: Core, lane: Lane) -> Generator[None]:
    """The context of a lane's thread where the levels are on a CPU.

    The fast lane's thread may compute on one core. The other lanes' threads inherit that core, so they are
    allowed on all of `cpus` again.
    """
    if lane is not Lane.FAST:
        stay_on(cpus)
    with torch.inference_mode(), slow() if lane is Lane.SLOW else nullcontext():
        yield


@contextmanager
def _on_stream(device: torch.device, lane: Lane) -> Generator[None]:
    """The context of a lane's thread beside a GPU: a stream of its own.

    The fast lane's work is launched by the thread that runs the task list, on that thread's stream.
    """
    with torch.inference_mode(), nullcontext() if lane is Lane.FAST else stream_of(device):
        yield
