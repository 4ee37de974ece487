"""The parts of a worker whose model is larger than its fast memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertStats
from moesaic.core.offload import Offload
from moesaic.core.tokens import TokenBatch
from moesaic.kernels import table
from moesaic.kvcache.paged import PagedKV
from moesaic.models import files, registry
from moesaic.models.checkpoint import Progress
from moesaic.models.headers import STORED, Headers
from moesaic.offload.after import AfterAttention, LocalAfterAttention, SlowExperts
from moesaic.offload.caches import Cache, Moving, Resident
from moesaic.offload.lanes import Lanes
from moesaic.offload.operations import Operations
from moesaic.offload.padding import PaddedMoving, PaddedResident, Padding, block_pool
from moesaic.offload.parts import UNPADDED, Rows
from moesaic.offload.passes import Observe, Passes, Way
from moesaic.policy.offloading.pipeline import FORCED, SCHEDULES
from moesaic.policy.offloading.policies import Policy
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.runtime.context import WorkerContext, WorkerParts
from moesaic.runtime.memory_levels import Core, Levels, cache, cores_of, levels, setup_of
from moesaic.runtime.model_loading import (
    LoadedModel,
    context_length,
    device_of,
    kv_type,
    layout_of,
    load_model,
    num_blocks_of,
)
from moesaic.runtime.step.running_step import StepResult, WholeStep
from moesaic.runtime.tracing import observer_of

LINGER = 0.05
"""Seconds that an idle worker waits for a further request before its first pass. A pass may read the model
from a disk, so one for the first request alone takes as long as one for all."""


def check(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that do not go with a fast memory that is too small for the model."""
    scheduler = config.scheduler
    for flag, value, allowed in (
        ("--schedule", scheduler.schedule, "lockstep"),
        ("--inflight-batches", scheduler.inflight_batches, 1),
        ("--combine", scheduler.combine, "exact"),
        ("--record-routing", config.record, None),
    ):
        if value != allowed:
            allowed_text = "nothing" if allowed is None else str(allowed)
            raise ConfigError.field(flag, value, f"{allowed_text} with --fast-memory")
    offload = config.offload
    if offload is not None and offload.link is not None and on_gpu(config.model):
        raise ConfigError.field("--device", "cuda", "cpu with a link between two cores")
    if offload is not None:
        _check_attention(offload)
    if offload is not None and offload.padded is not None:
        _check_padded(offload.padded, context_length(config.model))


def _check_attention(offload: Offload) -> None:
    """Some schedules have the slow processor attend, or not."""
    forced = FORCED.get(_policy(offload).schedule, offload.slow_attention)
    if forced != offload.slow_attention:
        raise ConfigError.field("slow_attention", offload.slow_attention, f"{forced} with {offload.schedule}")


def _check_padded(padded: int, most: int) -> None:
    if not 1 <= padded <= most:
        raise ConfigError.field("padded", padded, f"1 to {most}, the most tokens of a request")


def on_gpu(config: ModelConfig) -> bool:
    """Whether the fast level is a GPU's memory, and RAM the slow one; else they are RAM and the disk."""
    return device_of(config).type == "cuda"


def over_disk(config: WorkerConfig) -> bool:
    """Whether the slow level is the disk: then memory has to suffice for all that is not streamed."""
    offload = config.offload
    return offload is not None and offload.link is None and not on_gpu(config.model)


def build_parts(context: WorkerContext, offload: Offload) -> WorkerParts:
    """Load what stays on the fast level and build the parts of the worker."""
    config, limits = context.config, context.limits
    check(config)
    loaded, layout = load(config, offload, context.progress)
    kv_dtype = kv_type(config.cache, loaded)
    num_blocks = num_blocks_of(config, loaded, limits.max_model_len, kv_dtype)
    kv = cache(config, offload, loaded, num_blocks)
    observer = observer_of(config.trace, context.clock)
    runner = join(config, offload, loaded, layout, kv, observer.pass_ended)
    blocks = block_pool(
        num_blocks, config.cache.block_size, config.cache.enable_prefix_caching, offload.padded
    )
    return WorkerParts(
        loaded,
        kv_dtype,
        num_blocks,
        runner,
        LockstepScheduler(limits, blocks),
        expert_stats=runner.stats,
        observer=observer,
        logit_rows=offload.logit_rows,
        linger=LINGER,
        elsewhere=layout,
    )


@dataclass
class OffloadedRunner:
    """A StepRunner whose steps are passes over a model that is larger than the fast memory."""

    passes: Passes
    core: Core
    """The core of the fast processor, which computes the passes."""

    def begin(self, batch: TokenBatch) -> WholeStep:
        """See `StepRunner`."""
        return WholeStep(partial(self._compute, batch))

    def stats(self) -> ExpertStats:
        """Statistics of the passes so far."""
        return ExpertStats(passes=self.passes.stats())

    def _compute(self, batch: TokenBatch) -> StepResult:
        with self.core():
            return StepResult(self.passes.run(batch))


def load(
    config: WorkerConfig, offload: Offload, progress: Progress | None
) -> tuple[LoadedModel, ExpertLayout]:
    """All but the routed experts, on the fast level, and where those lie."""
    layout = paged_layout(config.model)
    threads = 1 if offload.link is not None else config.most_threads
    return load_model(config.model, progress, layout, threads, own_memory=over_disk(config)), layout


def paged_layout(config: ModelConfig) -> ExpertLayout:
    """Where the experts lie. Raises ConfigError where they are not computed from as they are stored: what is
    read into its place stays as it is."""
    layout, path = layout_of(config), files.resolve(config.model, config.revision)
    stored = Headers(path).find(*layout.tensors(layout.layers[0], 0)[0]).dtype
    if stored != STORED.get(layout.dtype):
        kernels = table.pick(str(device_of(config)), config.kernels).name
        raise ConfigError(
            f"--fast-memory: the experts of {path} are stored as {stored}, which {kernels} kernels "
            f"compute from as {layout.dtype}; allowed: experts that are computed from as they are stored"
        )
    return layout


def join(
    config: WorkerConfig,
    offload: Offload,
    loaded: LoadedModel,
    layout: ExpertLayout,
    kv: PagedKV,
    observe: Observe | None = None,
) -> OffloadedRunner:
    """The parts together. kv: of all layers, on the level that the policy says. observe: hears of passes."""
    path = files.resolve(config.model.model, config.model.revision)
    held = levels(config, offload, loaded, layout)
    slow = None
    if offload.schedule == "in-place":
        every = {layer: range(layout.num_experts) for layer in layout.layers}
        slow = SlowExperts(registry.load_experts(path, held.slow, every, dtype=layout.dtype), held.slow)
    after = LocalAfterAttention(loaded.model, held.experts, held.static, held.down, held.up, slow)
    passes = passes_over(config, offload, Pieces(loaded, held, after, layout.num_experts, kv), observe)
    return OffloadedRunner(passes, cores_of(offload, loaded.kernels)[0])


@dataclass(frozen=True)
class Pieces:
    """Of a process, what its passes go over."""

    loaded: LoadedModel
    held: Levels
    after: AfterAttention
    experts: int
    """See Way."""
    kv: PagedKV


def passes_over(
    config: WorkerConfig, offload: Offload, pieces: Pieces, observe: Observe | None = None
) -> Passes:
    """Passes, whose lanes' threads end with them."""
    loaded, held, after, kv = pieces.loaded, pieces.held, pieces.after, pieces.kv
    model, size = loaded.model, config.cache.block_size
    beside = [block.beside(held.slow) for block in model.blocks] if offload.slow_attention else ()
    likely = offload.likely_experts
    operations = Operations(model, held.experts, held.static, held.down, held.up, after, beside, likely)
    padded = offload.padded
    resident = Resident(kv, size) if padded is None else PaddedResident(kv, size)
    moving: Cache = resident
    if offload.slow_attention or offload.slow_cache:
        made = Moving if padded is None else PaddedMoving
        moving = made(kv, model.spec.kv, size, loaded.kernels, held.down, held.up, loaded.device)
    lanes = Lanes(setup_of(offload, loaded))
    decodes = resident if offload.slow_attention else moving
    rows: Rows = UNPADDED if padded is None else Padding(padded, size)
    way = Way(_policy(offload), offload.prefill_rows, pieces.experts, rows, held.staged)
    passes = Passes(model, way, operations, lanes, moving, decodes, observe)
    weakref.finalize(passes, lanes.__exit__)
    return passes


def _policy(offload: Offload) -> Policy:
    schedule = next((name for name in SCHEDULES if name == offload.schedule), None)
    if schedule is None:
        raise ConfigError.field("--offload-schedule", offload.schedule, ", ".join(SCHEDULES))
    return Policy(
        schedule=schedule,
        micro_batch=offload.micro_batch,
        micro_batches=offload.micro_batches,
        slow_attention=offload.slow_attention,
        static_experts=offload.static_experts,
        slow_cache=offload.slow_cache,
        fast_residual=offload.fast_residual,
        likely_experts=offload.likely_experts,
    )
