"""The parts of a worker whose model is in memory. Its routed experts are in this process or on servers.

Question: How is a schedule (`--schedule`) added, and where is it built?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import torch

from moesaic.config import ON_GPUS, WorkerConfig
from moesaic.core import curves, gpu_parts, paced_devices
from moesaic.core.curves import Curve, DeviceCurves
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.messages import Layout
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import TokenBatch
from moesaic.cost.curves import of_device
from moesaic.experts import measuring
from moesaic.experts.answer_check import AnswerCheck, Recompute
from moesaic.experts.client import DirectExperts, RoutedExperts
from moesaic.experts.connector import Connector, return_unchanged
from moesaic.experts.pacing import Pace, Pacing
from moesaic.experts.remote import RemoteExperts
from moesaic.models.kvcache.memory import CacheSize, layer_memory
from moesaic.policy.fleet.replicas import Replicas, ReplicaTimeout
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.minimum_batch import Decisions, cpu_curves
from moesaic.policy.scheduling.schedulers.actions import Scheduler
from moesaic.policy.scheduling.schedulers.asynchronous import AsyncScheduler
from moesaic.policy.scheduling.schedulers.barrier import BarrierScheduler
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.schedulers.server_setup import IN_ROUNDS, SEPARATE, queue_policy
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.runtime.cache_size import compute_cache_size, make_block_pool
from moesaic.runtime.context import AskingParts, WorkerContext, WorkerParts
from moesaic.runtime.drafting import add_room_for_drafts, make_prompt_rows, make_speculation, uses_mtp
from moesaic.runtime.model_loading import (
    LoadedModel,
    check_gpu_sharing,
    choose_kv_dtype,
    load_model,
    read_expert_layout,
)
from moesaic.runtime.observer import WorkerObserver
from moesaic.runtime.predicting import LayerPredictor, PredictionRunner
from moesaic.runtime.prefix_cache.build import compute_root
from moesaic.runtime.routing_recorder import build_recorder
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.recorded_runner import RecordedRunner
from moesaic.runtime.step.running_step import (
    Combine,
    RunningStep,
    SegmentRunner,
    StepGenerator,
    StepResult,
    StepRunner,
)
from moesaic.runtime.step.stages import BlockStages, SharedHeads
from moesaic.runtime.token_routes import TokenRoutes
from moesaic.runtime.tracing import make_observer
from moesaic.transport.wakeup import Wakeup

URGENT_SECONDS = 0.1
"""The asynchronous scheduler runs rows that have waited longer than this first, as the public code of its
paper does. See --queue-urgency."""
HEAP_SLACK = 1 << 20
"""Bytes of a connection's shared memory besides its rows."""


def build_parts(context: WorkerContext) -> WorkerParts:
    """Load the model and build the parts of its worker."""
    config, limits = context.config, context.limits  # both are checked before weights are read
    _check(config)
    layout = announce_layout(context) if config.remote_experts else None
    loaded_model = _load(context, layout)
    kv_dtype = choose_kv_dtype(config.cache, loaded_model)
    size = compute_cache_size(config, loaded_model, limits.max_model_len, kv_dtype)
    if layout is not None:
        return with_servers(context, layout, loaded_model, size)
    stages = _stages(config, loaded_model, size)
    experts = DirectExperts(loaded_model.model.experts, loaded_model.kernels, limits.max_num_batched_tokens)
    runner = _runner(context, stages, experts)
    speculation = make_speculation(config, loaded_model.model)
    prompt_rows = make_prompt_rows(config, loaded_model.model)
    root = compute_root(config, loaded_model, kv_dtype)
    blocks = make_block_pool(config.cache, size, stored_root=root)
    return WorkerParts(
        loaded_model,
        kv_dtype,
        size,
        runner,
        LockstepScheduler(limits, blocks, config.scheduler.inflight_batches, speculation, prompt_rows),
        stages.memory,
        stored_root=root,
        recorder=build_recorder(config, loaded_model.model.spec, context.routing),
        routes=TokenRoutes(loaded_model.model.spec.moe_layers)
        if loaded_model.model.spec.moe_layers
        else None,
        observer=make_observer(config.trace, context.clock),
        speculation=speculation,
        predictor=_predictor(stages, experts, runner),
    )


def with_servers(
    context: WorkerContext,
    layout: ExpertLayout,
    loaded_model: LoadedModel,
    size: CacheSize,
    shared_heads: SharedHeads | None = None,
) -> WorkerParts:
    """The parts of a worker whose routed experts are on servers. shared_heads: see `BlockStages`."""
    config = context.config
    observer = make_observer(config.trace, context.clock)
    stages = _stages(config, loaded_model, size, layout, shared_heads)
    wakeup = Wakeup()
    pacing = _make_pacing(config, wakeup)
    curves = choose_curves(config, loaded_model, layout)
    num_processes = config.expert_servers, config.attention_workers
    decisions = Decisions(curves, layout.num_experts, layout.top_k, *num_processes)
    timeout = ReplicaTimeout(floor=config.scheduler.replica_timeout)
    replicas = Replicas(timeout, config.own_server, pair_bytes=2 * 4 * layout.hidden)
    remote = _remote(
        context, layout, loaded_model, observer, wakeup, pacing, decisions.partial_answer_rows, replicas
    )
    unpaced_runner = _runner(context, stages, remote)
    runner, expert_stats = _apply_pace(unpaced_runner, remote.stats, pacing)
    clients = AskingParts(runner, remote, expert_stats)
    if config.model.cudagraph_mode == "full":
        clients = gpu_parts.full_graphs(context, stages, layout, remote, replicas, runner)
    speculation = make_speculation(config, loaded_model.model, layout.num_bytes)
    kv_dtype = choose_kv_dtype(config.cache, loaded_model)
    root = compute_root(config, loaded_model, kv_dtype)
    blocks = make_block_pool(config.cache, size, stored_root=root)
    return WorkerParts(
        loaded_model,
        kv_dtype,
        size,
        clients.runner,
        _scheduler(context, loaded_model, blocks, layout, speculation, decisions),
        stages.memory,
        stored_root=root,
        expert_stats=clients.stats,
        servers=clients.servers,
        layerwise=LayerwiseRunner(runner, remote),
        recorder=build_recorder(config, loaded_model.model.spec, context.routing),
        routes=TokenRoutes(layout.model_layers, remote),
        observer=observer,
        expert_layout=layout,
        speculation=speculation,
        least_rows=decisions.least_rows if config.scheduler.schedule == "async" else 0,
        predictor=_predictor(stages, remote, unpaced_runner if clients.runner is runner else clients.runner),
    )


def _load(context: WorkerContext, layout: ExpertLayout | None) -> LoadedModel:
    config, drafts = context.config, uses_mtp(context.config)
    max_threads = config.most_threads

    def load() -> LoadedModel:
        return load_model(config.model, context.progress, layout, max_threads, predicting=drafts)

    loaded_model = context.kept_model.get(
        (config.model, layout, max_threads, drafts, config.checkpoint_stamp), load
    )
    return add_room_for_drafts(loaded_model, config)


def _make_pacing(config: WorkerConfig, wakeup: Wakeup) -> Pacing | None:
    if config.paced is None:
        return None
    return Pacing.from_devices(paced_devices.read(Path(config.paced)), wakeup.ring)


def _apply_pace(
    runner: SegmentRunner, stats: Callable[[], ExpertStats], pacing: Pacing | None
) -> tuple[SegmentRunner, Callable[[], ExpertStats]]:
    """The runner with the timing of the modelled device, if there is one, and the counts with its runs."""
    if pacing is None:
        return runner, stats
    paced_runner = PacedRunner(runner, pacing.devices.attention, pacing.pace)
    return paced_runner, lambda: replace(stats(), pace=pacing.stats)


def _check(config: WorkerConfig) -> None:
    """Raises ConfigError for settings that need expert servers where there are none."""
    check_gpu_sharing(config)
    if config.model.cudagraph_mode == "full":
        gpu_parts.check_full_graphs(config)
    if config.remote_experts:
        return
    if config.scheduler.schedule != "lockstep":
        allowed_value = "lockstep without --expert-servers"
        raise ConfigError.field("--schedule", config.scheduler.schedule, allowed_value)
    if config.scheduler.combine == "partial":
        raise ConfigError.field("--combine", "partial", "exact without --expert-servers")


def announce_layout(context: WorkerContext) -> ExpertLayout:
    """Send where the experts are in the checkpoint, so that servers can load while this worker does."""
    layout = read_expert_layout(context.config.model, uses_mtp(context.config))
    context.connection.send(Layout(layout))
    return layout


def _stages(
    config: WorkerConfig,
    loaded_model: LoadedModel,
    size: CacheSize,
    layout: ExpertLayout | None = None,
    shared_heads: SharedHeads | None = None,
) -> BlockStages:
    """The model's stages over a new cache. layout: of experts on servers."""
    spec, device, block_size = loaded_model.model.spec, loaded_model.device, config.cache.block_size
    kv_dtype = choose_kv_dtype(config.cache, loaded_model)
    memory = layer_memory(spec, size, block_size, kv_dtype, device, loaded_model.kernels)
    partial, top_k = config.scheduler.combine == "partial", 0 if layout is None else layout.top_k
    combine = Combine(partial, config.scheduler.max_num_batched_tokens, top_k, device)
    return BlockStages(loaded_model.model, memory, block_size, device, combine, shared_heads)


def _predictor(stages: BlockStages, experts: RoutedExperts, runner: StepRunner) -> LayerPredictor | None:
    """runner: of the steps that it follows."""
    if stages.model.prediction is None:
        return None
    graphs = runner if isinstance(runner, PredictionRunner) else None
    return LayerPredictor(EagerRunner(stages, experts), graphs)


def _runner(context: WorkerContext, stages: BlockStages, experts: RoutedExperts) -> SegmentRunner:
    """Records decode steps unless --enforce-eager is given or the kernels cannot record. Steps that other
    processes take part in are recorded on GPUs only."""
    eager, make_recorder = EagerRunner(stages, experts), stages.model.kernels.recorder
    on_gpu = stages.device.type == "cuda"
    if (
        context.config.model.enforce_eager
        or make_recorder is None
        or (not on_gpu and stages.shared_heads is not None)
    ):
        return eager
    table_width = -(-context.limits.max_model_len // stages.block_size)
    make_runner = gpu_parts.graph_runner() if on_gpu else RecordedRunner
    return make_runner(eager, make_recorder, table_width, direct=isinstance(experts, DirectExperts))


def _scheduler(
    context: WorkerContext,
    loaded_model: LoadedModel,
    blocks: KVBlocks,
    layout: ExpertLayout,
    speculation: Speculation,
    decisions: Decisions,
) -> Scheduler:
    """The scheduler of a worker whose experts are on servers. layout: of these experts."""
    prompt_rows = make_prompt_rows(context.config, loaded_model.model, layout.num_bytes)
    scheduling, queues, limits = context.config.scheduler, context.config.queues, context.limits
    if scheduling.schedule == "lockstep":
        return LockstepScheduler(limits, blocks, scheduling.inflight_batches, speculation, prompt_rows)
    if scheduling.schedule == "barrier":
        return BarrierScheduler(limits, blocks, speculation, prompt_rows)
    if scheduling.schedule != "async" and scheduling.schedule != "auto":
        assert_never(scheduling.schedule)  # a new schedule must not become an asynchronous one in silence
    urgency, history = queues.urgency(URGENT_SECONDS), queues.queue_history
    policy = queue_policy(scheduling.schedule, scheduling.queue_policy, urgency, history)
    arguments = policy, len(layout.model_layers), decisions.top_k, decisions, speculation, prompt_rows
    return AsyncScheduler(limits, blocks, *arguments)


def _remote(
    context: WorkerContext,
    layout: ExpertLayout,
    loaded_model: LoadedModel,
    observer: WorkerObserver,
    wakeup: Wakeup,
    pacing: Pacing | None,
    told_rows: int,
    replicas: Replicas,
) -> RemoteExperts:
    """The client of the expert servers. Each connection's shared memory holds two of the largest steps."""
    config, rows = context.config, context.limits.max_num_batched_tokens
    heap = HEAP_SLACK + 2 * 4 * rows * (layout.hidden + layout.top_k * (layout.hidden + 2))
    schedule, memory = config.scheduler.schedule, None
    if config.transport in ON_GPUS:
        memory = gpu_parts.worker_memory(config.transport, str(loaded_model.device))
    wrap = return_unchanged if pacing is None else pacing.caller
    return RemoteExperts(
        layout,
        replicas,
        Connector(heap, wakeup, config.transport, wrap if memory is None else memory.wrap_caller),
        wakeup,
        context.clock,
        portion_rows=told_rows if schedule in SEPARATE else None,
        every_server=schedule in IN_ROUNDS,
        put=loaded_model.kernels.put,
        observer=observer,
        check=AnswerCheck(Recompute(Path(config.model.model), layout, config.model.mmap).is_finite),
        relay=config.scheduler.relay if pacing is None and memory is None else "off",
        memory=memory,
    )


def choose_curves(config: WorkerConfig, loaded_model: LoadedModel, layout: ExpertLayout) -> DeviceCurves:
    """The curves of the modelled device, of the file that is given, or of the device that computes.

    A worker decides by them which of its rows run alone (`policy.scheduling.minimum_batch`). A GPU that is
    not known has those of a CPU, but shares nothing.
    """
    if config.paced is not None:
        return paced_devices.read(Path(config.paced)).curves
    if config.policy_file is not None:
        return curves.read(Path(config.policy_file))
    model, size = loaded_model.model, torch.empty(0, dtype=loaded_model.dtype).element_size()
    other_parameters = replace(model, experts={}).num_bytes / size / model.spec.num_layers
    expert = 3.0 * layout.hidden * layout.width
    if loaded_model.device.type != "cuda":
        return cpu_curves(expert, other_parameters, loaded_model.threads, _measure_ratio(loaded_model))
    device_curves = of_device(torch.cuda.get_device_name(loaded_model.device), expert, other_parameters, size)
    return device_curves or replace(cpu_curves(expert, other_parameters), shares_cores=False)


def _measure_ratio(loaded_model: LoadedModel) -> float | None:
    """Rows for which the LM head is computed for as long as its weights are read."""
    model = loaded_model.model

    def run(rows: int) -> None:
        with torch.inference_mode():
            model.logits(torch.full((rows, model.spec.hidden_size), 0.01, device=loaded_model.device))

    sizes = tuple(model.head.shape)
    conditions = {"kernels": loaded_model.kernels.name, "threads": loaded_model.threads, "sizes": sizes}
    return measuring.measure_ratio(run, {**conditions, "type": str(loaded_model.dtype)})


@dataclass(frozen=True)
class PacedRunner:
    """A `SegmentRunner` that holds each segment of a step until the modelled device would have finished.

    It is a test instrument (`core.paced_devices`).
    """

    runner: SegmentRunner
    curve: Curve
    pace: Pace

    def begin(self, batch: TokenBatch) -> RunningStep:
        """Begin a step, whose segments are held for the time of the paced device."""
        return self._hold_segments(self.runner.begin(batch), batch)

    def begin_at_segment(self, segment: int, batch: TokenBatch, hidden: torch.Tensor) -> RunningStep:
        """Begin at a segment, which is held for the time of the paced device."""
        return self._hold_segments(self.runner.begin_at_segment(segment, batch, hidden), batch)

    def _hold_segments(self, step: RunningStep, batch: TokenBatch) -> RunningStep:
        seconds = self.curve.seconds(batch.num_rows)
        return step.wrap_generator(lambda generator: _holding(generator, seconds, self.pace))


def _holding(generator: StepGenerator, seconds: float, pace: Pace) -> StepGenerator:
    """The same step. Before each request, and before the result, `seconds` of the modelled device pass."""
    answer: torch.Tensor | None = None
    while True:
        began = pace.now
        try:
            request = generator.send(answer)
        except StopIteration as end:
            pace.hold(began, seconds)
            result: StepResult = end.value
            return result
        pace.hold(began, seconds)
        yield request
        answer = yield generator.send(None)
