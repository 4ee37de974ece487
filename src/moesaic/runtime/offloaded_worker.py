"""The parts of a worker whose model is larger than its fast memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertStats, PlanStats
from moesaic.core.offload import Offload
from moesaic.core.speculation import FLAG
from moesaic.core.tokens import TokenBatch
from moesaic.core.weight_types import is_packed
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.conversion import conversion_of, sizes_of
from moesaic.models.headers import COMPRESSED_ROWS, STORED, Headers
from moesaic.models.kvcache.elastic_kv import ElasticKV
from moesaic.models.spec import ModelSpec
from moesaic.offload import converted_experts
from moesaic.offload.caches import Cache, HybridCache, MovingCache, ResidentCache
from moesaic.offload.elastic_experts import ElasticExperts
from moesaic.offload.lanes import Lanes
from moesaic.offload.operations import Operations
from moesaic.offload.padding import PaddedMovingCache, PaddedResidentCache, Padding
from moesaic.offload.parts import UNPADDED, Rows
from moesaic.offload.passes import Observe, Passes, PassSettings
from moesaic.offload.post_attention import LocalPostAttention, PostAttention, SlowExperts, learn_nothing
from moesaic.offload.splitting import Splitting
from moesaic.policy.offloading.dividing import Dividing
from moesaic.policy.offloading.pipeline import FORCED, SCHEDULES, Schedule
from moesaic.policy.offloading.policies import Policy, max_rows_by_choice
from moesaic.policy.offloading.residency import HotExperts
from moesaic.policy.offloading.revising import Revising
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.runtime.cache_size import compute_cache_size, make_block_pool
from moesaic.runtime.context import WorkerContext, WorkerParts
from moesaic.runtime.divided_memory import DividedMemory, MemoryMover, ReadMeter, divide_memory
from moesaic.runtime.drafting import (
    add_room_for_drafts,
    make_speculation,
    most_checked_rows,
    uses_mtp,
)
from moesaic.runtime.hot_list import ListKeeper
from moesaic.runtime.memory_levels import (
    Caches,
    Core,
    Levels,
    build_caches,
    build_levels,
    choose_cores,
    make_lane_setup,
)
from moesaic.runtime.model_loading import (
    LoadedModel,
    choose_kv_dtype,
    context_length,
    load_model,
    read_expert_layout,
    select_device,
)
from moesaic.runtime.prefix_cache.build import compute_root
from moesaic.runtime.step.running_step import StepResult, WholeStep
from moesaic.runtime.tracing import make_observer

LINGER = 0.05
"""Seconds that an idle worker waits for a further request before its first pass. A pass may read the model
from a disk, so one for the first request alone takes as long as one for all."""


def check(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that do not work with a model larger than the fast memory."""
    scheduler = config.scheduler
    for flag, value, allowed_value in (
        ("--schedule", scheduler.schedule, "lockstep"),
        ("--inflight-batches", scheduler.inflight_batches, 1),
        ("--combine", scheduler.combine, "exact"),
        ("--record-routing", config.record, None),
        ("--prefill-step-ms", scheduler.prefill_step_ms, None),
    ):
        if value != allowed_value:
            allowed_text = "nothing" if allowed_value is None else str(allowed_value)
            raise ConfigError.field(flag, value, f"{allowed_text} with --fast-memory")
    offload = config.offload
    is_padded = offload is not None and offload.padded_prompt_len is not None
    check_drafts(config, is_padded, is_on_gpu(config.model))
    if offload is not None and offload.link is not None and is_on_gpu(config.model):
        raise ConfigError.field("--device", "cuda", "cpu with a link between two cores")
    if offload is not None:
        _check_attention(offload)
    if offload is not None and offload.padded_prompt_len is not None:
        _check_padded(offload.padded_prompt_len, context_length(config.model))


def check_drafts(config: WorkerConfig, is_padded: bool, on_gpu: bool) -> None:
    """Raises ConfigError for drafts that a pass over a model larger than its fast memory cannot check."""
    text = config.scheduler.speculative_config
    if text is None:
        return
    if uses_mtp(config):
        raise ConfigError.field(f"{FLAG}: method", "mtp", "ngram with --fast-memory")
    if is_padded:
        raise ConfigError.field("--pad", "true", f"false with {FLAG}")
    if on_gpu:
        raise ConfigError.field(FLAG, text, "nothing with --fast-memory on a GPU")


def _check_attention(offload: Offload) -> None:
    """Raises ConfigError where the schedule decides who computes attention and `slow_attention` differs."""
    if (offload.schedule == "split") != (offload.prices is not None):
        raise ConfigError.field("prices", offload.prices, "prices with split, and nothing with others")
    forced_attention = FORCED.get(_policy(offload).schedule, offload.slow_attention)
    if forced_attention != offload.slow_attention:
        raise ConfigError.field(
            "slow_attention", offload.slow_attention, f"{forced_attention} with {offload.schedule}"
        )
    allowed_shares = "1 with attention on the slow level" if offload.slow_attention else "0 to 1"
    if not 0 <= offload.slow_cache <= 1 or (offload.slow_attention and 0 < offload.slow_cache < 1):
        raise ConfigError.field("slow_cache", offload.slow_cache, allowed_shares)


def _check_padded(padded_tokens: int, max_tokens: int) -> None:
    if not 1 <= padded_tokens <= max_tokens:
        raise ConfigError.field("padded", padded_tokens, f"1 to {max_tokens}, the most tokens of a request")


def check_states(config: WorkerConfig, offload: Offload, spec: ModelSpec) -> None:
    """Raises ConfigError for settings that do not work with states of linear attention."""
    if spec.states is None:
        return
    condition = "for a model with linear attention"
    if offload.padded_prompt_len is not None:
        raise ConfigError.field("--pad", "true", f"false {condition}")
    if 0 < offload.slow_cache < 1:
        raise ConfigError.field("slow_cache", offload.slow_cache, f"0 or 1 {condition}")
    if is_on_gpu(config.model):
        raise ConfigError.field("--device", "cuda", f"cpu with --fast-memory, {condition}")


def is_on_gpu(config: ModelConfig) -> bool:
    """Whether the levels are a GPU's memory and RAM. Otherwise they are RAM and the disk."""
    return select_device(config).type == "cuda"


def is_over_disk(config: WorkerConfig) -> bool:
    """Whether the slow level is the disk. Then everything that is not streamed must fit into memory."""
    offload = config.offload
    return offload is not None and offload.link is None and not is_on_gpu(config.model)


def build_parts(context: WorkerContext, offload: Offload) -> WorkerParts:
    """Load what stays on the fast level and build the parts of the worker."""
    config, limits = context.config, context.limits
    check(config)
    loaded_model, layout = load(config, offload, context.progress)
    loaded_model = add_room_for_drafts(loaded_model, config)
    kv_dtype = choose_kv_dtype(config.cache, loaded_model)
    size = compute_cache_size(config, loaded_model, limits.max_model_len, kv_dtype)
    check_states(config, offload, loaded_model.model.spec)
    path, spec = files.resolve(*config.model.source), loaded_model.model.spec
    division_plan = divide_memory(config, path, layout, spec, size, kv_dtype, limits.max_model_len)
    caches = build_caches(config, offload, loaded_model, size, division_plan)
    observer = make_observer(config.trace, context.clock)
    runner = join(config, offload, loaded_model, layout, caches, observer.on_pass_ended, division_plan)
    if offload.choices:
        runner = replace(runner, revising=Revising(offload.loads, offload.choices))
    root = compute_root(config, loaded_model, kv_dtype)
    speculation = make_speculation(config, loaded_model.model, layout.num_bytes)
    blocks = make_block_pool(config.cache, size, offload.padded_prompt_len, root)
    return WorkerParts(
        loaded_model,
        kv_dtype,
        size,
        runner,
        LockstepScheduler(
            limits, blocks, speculation=speculation, divider=_make_divider(offload, division_plan, runner)
        ),
        caches.memory(loaded_model.model.spec),
        stored_root=root,
        expert_stats=runner.stats,
        observer=observer,
        logit_rows=offload.logit_rows,
        speculation=speculation,
        linger=0.0 if offload.choices else LINGER,
        expert_layout=layout,
        divide=None if runner.mover is None else runner.mover.divide,
    )


def _make_divider(
    offload: Offload, division_plan: DividedMemory | None, runner: OffloadedRunner
) -> Dividing | None:
    if division_plan is None:
        return None
    assert offload.division is not None and runner.meter is not None
    dividing = Dividing(division_plan.divisions, offload.division)
    dividing.learn(runner.meter.read())
    return dividing


def keep_nothing() -> None:
    """Does nothing, where nothing is learned."""


@dataclass
class OffloadedRunner:
    """A StepRunner whose steps are passes over a model that is larger than the fast memory."""

    passes: Passes
    core: Core
    """The core of the fast processor, which computes the passes."""

    expert_bytes: int = 0
    """Bytes of an expert in memory."""
    revising: Revising | None = None
    """Chooses how the next decode pass is computed. None: all are computed alike."""
    keep: Callable[[], None] = keep_nothing
    """Called after each step, to keep what was learned."""
    listed_experts: int = 0
    """Experts that are in memory at the start because earlier runs chose them."""
    mover: MemoryMover | None = None
    """Divides memory between experts and KV cache. None: it stays as it is."""
    meter: ReadMeter | None = None
    """Measures what reading costs, where memory is divided."""

    def begin(self, batch: TokenBatch) -> WholeStep:
        """Begin a step, which is one pass over the model."""
        return WholeStep(partial(self._compute, batch))

    def stats(self) -> ExpertStats:
        """Statistics of the passes so far."""
        residency, revising = self.passes.residency, self.revising
        by_choice, paged_steps = self.passes.decode_steps
        return ExpertStats(
            passes=self.passes.stats(),
            residency=replace(residency, held_bytes=residency.hits * self.expert_bytes),
            plan=PlanStats(
                by_choice,
                paged_steps,
                self.passes.policy.micro_batch,
                self.listed_experts,
                revising.revisions if revising else 0,
                self.mover.residents if self.mover else self.passes.policy.static_experts,
                self.mover.changes if self.mover else 0,
            ),
        )

    def _compute(self, batch: TokenBatch) -> StepResult:
        with self.core():
            # Choices are made for decode passes.
            if self.revising is not None and not self.passes.has_prompts(batch):
                self._revise(self.revising, batch)
            hidden = self.passes.run(batch)
        result = StepResult(hidden, expert_reads=self.meter.after_step() if self.meter else None)
        self.keep()
        return result

    def _revise(self, revising: Revising, batch: TokenBatch) -> None:
        """Chooses the policy of a decode pass by its load."""
        requests = batch.num_sequences
        choice = revising.choose(requests, float(batch.context_lens.mean()))
        policy = replace(
            self.passes.policy,
            schedule=parse_schedule(choice.schedule),
            micro_batch=choice.micro_batch,
            micro_batches=-(-requests // choice.micro_batch),
            likely_experts=choice.likely_experts,
        )
        if policy != self.passes.policy:
            self.passes.revise(policy)


def load(
    config: WorkerConfig, offload: Offload, progress: Progress | None
) -> tuple[LoadedModel, ExpertLayout]:
    """Load everything but the routed experts onto the fast level, and find the experts in the checkpoint."""
    layout = paged_layout(config.model)
    # With a link two cores stand for the two levels, so each level computes with one thread.
    threads = 1 if offload.link is not None else config.most_threads
    return load_model(config.model, progress, layout, threads, own_memory=is_over_disk(config)), layout


def paged_layout(config: ModelConfig) -> ExpertLayout:
    """Where the experts are in the checkpoint.

    Raises ConfigError for experts that the kernels cannot use as they are stored: only quantised experts,
    compressed ones and those in columns are converted.
    """
    path = files.resolve(*config.source)
    layout = read_expert_layout(config)
    _require_like_types(layout, path)
    headers, first = Headers(path), layout.tensors(layout.layers[0], 0)[0]
    stored_dtype = None if headers.find_quantized(*first) is not None else headers.find(*first).dtype
    if stored_dtype not in (None, COMPRESSED_ROWS, STORED.get(layout.dtype)):
        kernels = table.pick(str(select_device(config)), config.kernels).name
        raise ConfigError(
            f"--fast-memory: the experts of {path} are stored as {stored_dtype}, which {kernels} kernels "
            f"compute from as {layout.dtype}; allowed: experts that are computed from as they are stored, "
            "or quantised or compressed"
        )
    return layout


def _require_like_types(layout: ExpertLayout, path: Path) -> None:
    """Raises ConfigError if experts are quantised in some layers only: a plan counts one way to load them."""
    for layer, dtype in layout.layer_dtypes.items():
        if is_packed(dtype) != is_packed(layout.dtype):
            kinds = "quantised types" if is_packed(layout.dtype) else layout.dtype
            raise ConfigError(
                f"--fast-memory: the experts of {path}: layer {layer}: got {dtype}; allowed: {kinds}, as in "
                f"layer {layout.layers[0]}"
            )


def find_conversion(config: ModelConfig) -> tuple[str, int, Callable[[], object]] | None:
    """What happens to an expert that is loaded: the name of its conversion (`models.conversion`), how many
    bytes of the files are converted, and a function that converts those of one expert again and again.

    None if nothing is converted. Raises ConfigError as `paged_layout` does.
    """
    layout, path = paged_layout(config), files.resolve(*config.source)
    headers = Headers(path)
    expert_conversion = conversion_of(headers, layout)
    if expert_conversion is None:
        return None
    layer = next(layer for layer in layout.layers if layout.dtype_of(layer) == layout.largest)
    return (
        expert_conversion.name,
        sizes_of(headers, layout, layer)[0],
        converted_experts.repeat_conversion(path, layout, layer),
    )


def join(
    config: WorkerConfig,
    offload: Offload,
    loaded_model: LoadedModel,
    layout: ExpertLayout,
    caches: Caches,
    observe: Observe | None = None,
    division_plan: DividedMemory | None = None,
) -> OffloadedRunner:
    """Build the runner of a worker.

    caches: of all layers. observe: gets the tasks and times of every pass. division_plan: how memory may be
    divided between steps.
    """
    path = files.resolve(*config.model.source)
    memory = build_levels(config, offload, loaded_model, layout, division_plan=division_plan)
    slow = None
    split = offload.schedule == "split"
    if split or offload.schedule == "in-place":
        experts_by_layer = {layer: range(layout.num_experts) for layer in layout.layers}
        slow_weights = registry.load_experts(path, memory.slow, experts_by_layer, dtype=layout.dtype)
        slow = SlowExperts(slow_weights, memory.slow, by_price=split)
    hot = HotExperts(layout.num_experts, memory.hot_list.counts)
    # On a GPU the ids of other gates than those of `on-demand` and `split` stay there: the launches do not
    # wait for them.
    learns = memory.exchanges is not None and loaded_model.device.type == "cpu"
    post_attention = LocalPostAttention(
        loaded_model.model,
        *(memory.experts, memory.static, memory.down_link, memory.up_link, slow),
        partial(learn_choices, hot) if learns else learn_nothing,
    )
    splitting = Splitting(offload.prices, memory.static, post_attention) if split and offload.prices else None
    parts = PassParts(loaded_model, memory, post_attention, layout.num_experts, caches, splitting, hot)
    passes = build_passes(
        config, offload, parts, observe, rows_by_choice=_find_rows_by_choice(offload, loaded_model)
    )
    keep = keep_nothing if memory.exchanges is None else ListKeeper(memory.hot_list, hot).after_step
    core, num_listed = choose_cores(offload, loaded_model.kernels)[0], memory.num_listed
    runner = OffloadedRunner(passes, core, layout.expert_bytes, keep=keep, listed_experts=num_listed)
    if division_plan is None:
        return runner
    assert isinstance(memory.experts, ElasticExperts) and isinstance(caches.kv, ElasticKV)
    mover = MemoryMover(memory.experts, caches.kv, hot, passes)
    return replace(runner, mover=mover, meter=ReadMeter(offload, division_plan, hot, passes))


def _find_rows_by_choice(offload: Offload, loaded_model: LoadedModel) -> int:
    """The value of PassSettings. On a GPU choices are waited for, and padded prompts have many rows."""
    if loaded_model.device.type != "cpu" or offload.padded_prompt_len is not None:
        return 0
    spec = loaded_model.model.spec
    return max_rows_by_choice(spec.num_experts, spec.top_k)


def learn_choices(hot: HotExperts, layer: int, expert_ids: torch.Tensor, steps: float) -> None:
    """Count the choices of a gate. expert_ids: [n, k] on the CPU."""
    hot.learn(layer, expert_ids.flatten().numpy(), steps)


@dataclass(frozen=True)
class PassParts:
    """What the passes of a process compute with."""

    loaded_model: LoadedModel
    levels: Levels
    post_attention: PostAttention
    max_experts: int
    """The most experts of one layer in this process."""
    caches: Caches
    splitting: Splitting | None = None
    hot: HotExperts | None = None
    """Counts choices, to decide which experts stay. None: those of earlier runs are not known."""


def build_passes(
    config: WorkerConfig,
    offload: Offload,
    parts: PassParts,
    observe: Observe | None = None,
    rows_by_choice: int = 0,
) -> Passes:
    """The passes of a process. The threads of their lanes end when the passes are deleted.

    rows_by_choice: as in PassSettings.
    """
    loaded_model, memory, post_attention = parts.loaded_model, parts.levels, parts.post_attention
    model, size = loaded_model.model, config.cache.block_size
    slow_blocks = (
        [block.with_attention_kernels(memory.slow) for block in model.blocks]
        if offload.slow_attention
        else ()
    )
    experts_and_links = memory.experts, memory.static, memory.down_link, memory.up_link
    operations = Operations(
        model,
        *experts_and_links,
        post_attention,
        *(slow_blocks, offload.likely_experts),
        exchanges=memory.exchanges,
        splitting=parts.splitting,
        hot=parts.hot,
    )
    lanes = Lanes(make_lane_setup(offload, loaded_model))
    prompts, decodes = _build_caches(offload, parts, size)
    padded_tokens = offload.padded_prompt_len
    rows: Rows = UNPADDED if padded_tokens is None else Padding(padded_tokens, size)
    settings = PassSettings(
        *(_policy(offload), offload.prefill_rows, parts.max_experts, rows, memory.is_staged),
        checked_rows=0 if config.scheduler.speculative_config is None else most_checked_rows(config),
        rows_by_choice=rows_by_choice,
    )
    passes = Passes(model, settings, operations, lanes, prompts, decodes, observe)
    weakref.finalize(passes, lanes.__exit__)
    return passes


def _build_caches(offload: Offload, parts: PassParts, block_size: int) -> tuple[Cache, Cache]:
    """The caches for prefill passes and for decode passes."""
    loaded_model, memory, caches = parts.loaded_model, parts.levels, parts.caches
    is_padded, spec = offload.padded_prompt_len is not None, loaded_model.model.spec
    resident: Cache = (PaddedResidentCache if is_padded else ResidentCache)(caches.kv, block_size)
    moving: Cache = resident
    if offload.slow_attention or offload.slow_cache:
        kind = PaddedMovingCache if is_padded else MovingCache
        moving = kind(
            caches.kv,
            spec.kv,
            block_size,
            loaded_model.kernels,
            memory.down_link,
            memory.up_link,
            loaded_model.device,
            caches.fast,
        )
    if caches.states is not None:
        layers = spec.state_layers, spec.num_layers
        resident, moving = (HybridCache(cache, caches.states, *layers) for cache in (resident, moving))
    return moving, resident if offload.slow_attention else moving


def parse_schedule(name: str) -> Schedule:
    """The schedule of this name. Raises ConfigError for an unknown one."""
    schedule = next((known_schedule for known_schedule in SCHEDULES if known_schedule == name), None)
    if schedule is None:
        raise ConfigError.field("--offload-schedule", name, ", ".join(SCHEDULES))
    return schedule


def _policy(offload: Offload) -> Policy:
    return Policy(
        schedule=parse_schedule(offload.schedule),
        micro_batch=offload.micro_batch,
        micro_batches=offload.micro_batches,
        slow_attention=offload.slow_attention,
        static_experts=offload.static_experts,
        slow_cache=offload.slow_cache,
        fast_residual=offload.fast_residual,
        likely_experts=offload.likely_experts,
    )
