"""Plans a worker with a model larger than its fast memory: from a job and a machine to its settings.

After the run it also predicts how long the passes should have taken, to compare with what they took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from moesaic.config import CacheConfig, OffloadConfig, SchedulerConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import PassStats
from moesaic.core.offload import Offload
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.speculation import SpeculativeConfig
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.ranks import model_of_rank, share_of_rank
from moesaic.cost.routing import Routing
from moesaic.cost.sizes import ModelSizes
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.shard import Shard
from moesaic.planning.search import Job, JobSearch
from moesaic.planning.sizes import ROW_BYTES, read_checkpoint_sizes
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.planner import SEARCHED, SearchLimits
from moesaic.policy.offloading.pricing import Price, Pricing

SAMPLING = 14
"""Maximum number of copies of a row's logits in memory while its token is sampled."""
NEAR_SHARE = 0.01
"""Policies count as equal if their speeds differ by less than this share. Many do when the disk is the
limit."""
OVER_DISK: tuple[Schedule, ...] = ("cgopipe", "on-demand")
"""Schedules that work with a disk as the slow level, in the order of the search."""
CPU_SCHEDULES: tuple[Schedule, ...] = ("in-place", "split", "s2", "s3")
"""Schedules in which the CPU computes."""
GATE_FIRST_SCHEDULES: tuple[Schedule, ...] = ("on-demand", "in-place", "split")
"""Schedules that compute a layer's gates before they load any of its experts."""
EXCHANGING_SCHEDULES: tuple[Schedule, ...] = ("on-demand", "split")
"""Schedules in which experts on a GPU that are chosen often take the places of others."""
GROUP_SCHEDULES: tuple[Schedule, ...] = ("cgopipe",)
"""Schedules for a group of processes.

The ranks exchange rows between gate and experts, so gate and experts have to be one task.
"""


@dataclass(frozen=True)
class WorkerPlan:
    """A policy and its inputs. For a group of processes they are those of each rank."""

    model: ModelSizes
    hardware: Hardware
    """The machine, with the fast level reduced to the memory that the worker may take."""
    price: Price
    worker: WorkerConfig
    """Settings of the worker that runs the policy."""

    def predict_seconds(self, pass_stats: PassStats, link: float | None = None) -> float:
        """Seconds that these passes should have taken, by the roofline of their rows.

        Logits are not included.

        link: bytes/s that the slow level reached, if known. None: the plan's figure.
        """
        hardware = self.hardware if link is None else self.hardware.with_link(link)
        sequences = pass_stats.passes * pass_stats.sequences
        policy = replace(
            self.price.policy,
            micro_batch=math.ceil(pass_stats.sequences / pass_stats.micro_batches),
            micro_batches=pass_stats.micro_batches,
        )
        rows, context = (
            pass_stats.rows + pass_stats.padding_rows,
            pass_stats.context + pass_stats.padding_context,
        )
        tokens = rows if pass_stats.prefill else context
        workload = replace(self.price.workload, prompt=max(1, round(tokens / sequences)), generate=1)
        pricing = Pricing(replace(self.model, vocab=0), hardware, workload)
        phase = (
            pricing.prefill(policy, pass_stats.micro_batches) if pass_stats.prefill else pricing.step(policy)
        )
        return pass_stats.passes * phase.seconds + pass_stats.cold * pricing.durations.first_layer(policy)


def plan(
    worker: WorkerConfig, options: OffloadConfig, job: Job, hardware: Hardware, gpus: int = 0
) -> WorkerPlan:
    """Plan a worker: RAM over the checkpoint's disk, or a GPU over RAM.

    gpus: number of GPUs for the ranks. 0: the fast level is RAM. Raises ConfigError for

     - a fast memory that is too small; the message names the smallest that is enough,
     - flags that the plan sets or that leave no choice,
     - a machine without the levels that are needed.
    """
    gpu, ranks = gpus > 0, worker.parallel.tensor_parallel_size
    _refuse_planned(worker, options, gpu)
    _refuse_machine(hardware, options, gpu)
    if gpu and hardware.link.staging is None:
        # Pages go through pinned memory, which the CPU reads and writes.
        hardware = replace(hardware, link=replace(hardware.link, staging=hardware.slow.bandwidth / 2))
    model, limits = _sizes(worker, options.profile, gpu), _limits(options, job, ranks, gpu)
    if ranks > 1:
        model = model_of_rank(model, ranks, _experts_of_rank(worker, model))
        hardware = share_of_rank(hardware, ranks, gpus)
    cap = _cap(options, hardware, gpu)
    search = JobSearch(model, hardware, job, _cache_number(worker, model, gpu), limits)
    result = search.find_policy(cap)
    if result is None:
        least = search.find_least_cap(cap)
        if least is None:
            raise ConfigError(search.explain_misfit(cap))
        allowed_values = f"at least {least}MiB for {search.model.name} and these requests"
        raise ConfigError.field("--fast-memory", options.fast_memory, allowed_values)
    pricing, price, tokens = result
    settings = _add_padding(_settings(worker, options, pricing, price, tokens), job.padded_length)
    return WorkerPlan(search.model, pricing.hardware, price, settings)


def _experts_of_rank(worker: WorkerConfig, model: ModelSizes) -> int:
    """The largest number of experts of one layer that a rank has.

    Raises ConfigError if the heads cannot be divided, and for a placement of another model's experts.
    """
    parallel, path = worker.parallel, files.resolve(*worker.model.source)
    registry.read_spec(path, Shard(0, parallel.tensor_parallel_size))
    if parallel.placement is None:
        return math.ceil(model.experts / parallel.tensor_parallel_size)
    routed_model = registry.routed_model(path)
    placement = Placement.read(parallel.placement, parallel.tensor_parallel_size)
    placement.check(routed_model.model, routed_model.layers, routed_model.num_experts)
    return max(
        len(experts) for servers in placement.experts_by_layer.values() for experts in servers.values()
    )


def _refuse_machine(hardware: Hardware, options: OffloadConfig, gpu: bool) -> None:
    """Raises ConfigError if a disk should compute, or should be a GPU's slow memory."""
    if gpu == (hardware.slow.processor is not None):
        return
    levels = "GPU memory over RAM" if gpu else "RAM over a disk, which computes nothing"
    known_gpu = "a known GPU, or " if gpu else ""
    allowed_values = (
        f"{known_gpu}a file of `moesaic hardware measure --device {'cuda' if gpu else 'cpu'}`: {levels}"
    )
    raise ConfigError.field("--hardware", options.hardware, allowed_values)


def _cap(options: OffloadConfig, hardware: Hardware, gpu: bool) -> int:
    """The fast memory in bytes. Raises ConfigError if it is not a size, or more than the GPU has."""
    assert options.fast_memory is not None
    if options.fast_memory == "auto":
        if not gpu:
            raise ConfigError.field("--fast-memory", "auto", "a size, such as 2GiB; auto is for a GPU")
        return int(hardware.fast.room)
    cap = parse_bytes("--fast-memory", options.fast_memory)
    if gpu and cap > hardware.fast.memory:
        limit = f"at most {hardware.fast.memory / GIB:.1f} GiB, the memory of {hardware.name}"
        raise ConfigError.field("--fast-memory", options.fast_memory, limit)
    return cap


def _refuse_planned(worker: WorkerConfig, options: OffloadConfig, gpu: bool) -> None:
    """Raises ConfigError for flags that the plan sets, and for schedules that this machine or group lacks."""
    if options.offload_schedule in CPU_SCHEDULES and not gpu:
        allowed_values = "auto, cgopipe, on-demand, s4, serial over a disk, which computes nothing"
        raise ConfigError.field("--offload-schedule", options.offload_schedule, allowed_values)
    if gpu and worker.cache.kv_cache_dtype == "float16":
        allowed_values = "auto, bfloat16, float32, int8 with --fast-memory on a GPU: the CPU reads it, too"
        raise ConfigError.field("--kv-cache-dtype", "float16", allowed_values)
    if worker.parallel.tensor_parallel_size > 1 and options.offload_schedule in GATE_FIRST_SCHEDULES:
        allowed_values = f"auto, cgopipe, {'s2, s3, ' * gpu}s4, serial with --tensor-parallel-size"
        raise ConfigError.field("--offload-schedule", options.offload_schedule, allowed_values)
    scheduler, cache = worker.scheduler, worker.cache
    for flag, value, left_out in (
        ("--max-num-seqs", scheduler.max_num_seqs, SchedulerConfig.max_num_seqs),
        (
            "--max-num-batched-tokens",
            scheduler.max_num_batched_tokens,
            SchedulerConfig.max_num_batched_tokens,
        ),
        ("--kv-cache-memory", cache.kv_cache_memory, CacheConfig.kv_cache_memory),
    ):
        if value != left_out:
            allowed_values = "nothing with --fast-memory, whose plan sets it (see --micro-batch-size)"
            raise ConfigError.field(flag, value, allowed_values)


def longest_request(worker: WorkerConfig) -> int:
    """Maximum number of tokens of one request, prompt and answer, by the settings and by the model.

    Raises ConfigError for a --max-model-len above the model's own.
    """
    model_limit = registry.read_spec(files.resolve(*worker.model.source)).max_position
    max_model_len = worker.model.max_model_len or model_limit
    if max_model_len > model_limit:
        raise ConfigError.field("--max-model-len", max_model_len, f"at most {model_limit}, the model's own")
    return max_model_len


def _limits(options: OffloadConfig, job: Job, ranks: int, gpu: bool) -> SearchLimits:
    size = options.micro_batch_size
    schedules = GROUP_SCHEDULES if ranks > 1 else SEARCHED if gpu else OVER_DISK
    return SearchLimits(
        schedules=schedules if options.offload_schedule == "auto" else (options.offload_schedule,),
        largest_batch=job.requests,
        micro_batch=None if size is None else int(min(size, job.requests)),
        micro_batches=options.micro_batches,
        requests=job.requests,
        tolerance=NEAR_SHARE,
    )


def _settings(
    worker: WorkerConfig, options: OffloadConfig, pricing: Pricing, price: Price, tokens: int
) -> WorkerConfig:
    """The worker's settings for a policy. tokens: capacity of the cache."""
    policy, workload = price.policy, pricing.workload
    token = pricing.model.layers * pricing.model.cache(1, workload.cache_number)
    block = worker.cache.block_size
    logits = SAMPLING * 4 * pricing.model.vocab
    offload = Offload(
        fast_memory=int(pricing.hardware.fast.memory),
        schedule=policy.schedule,
        micro_batch=policy.micro_batch,
        micro_batches=policy.micro_batches,
        prefill_rows=pricing.footprint.prefill_requests(policy) * workload.prompt,
        static_experts=policy.static_experts,
        likely_experts=policy.likely_experts,
        slow_attention=policy.slow_attention,
        slow_cache=policy.slow_cache,
        fast_residual=policy.fast_residual,
        logit_rows=max(1, int(price.fast["workspace"] / logits)),
        hot=pricing.hardware.slow.processor is not None and policy.schedule in EXCHANGING_SCHEDULES,
        hot_experts=options.hot_experts,
        prices=pricing.durations.split_prices() if policy.schedule == "split" else None,
    )
    scheduler = replace(
        worker.scheduler,
        max_num_seqs=policy.batch,
        max_num_batched_tokens=policy.batch * workload.prompt,
    )
    states = policy.batch * (pricing.model.seat + pricing.model.page) + pricing.model.page
    size = math.ceil(tokens / block) * block * round(token) + math.ceil(states)
    # --kv-cache-memory is that of all ranks together, and the plan's sizes are those of one.
    size *= worker.parallel.tensor_parallel_size
    cache = replace(worker.cache, kv_cache_memory=str(size))
    model = replace(worker.model, max_model_len=min(longest_request(worker), tokens))
    return replace(worker, model=model, cache=cache, scheduler=scheduler, offload=offload)


def _add_padding(worker: WorkerConfig, longest: int | None) -> WorkerConfig:
    """The settings with padding to `longest`, if that is given.

    With padding, prompts are computed completely, without a shared prefix.
    """
    if longest is None:
        return worker
    assert worker.offload is not None
    cache = replace(worker.cache, enable_prefix_caching=False)
    return replace(worker, offload=replace(worker.offload, padded_prompt_len=longest), cache=cache)


def _sizes(worker: WorkerConfig, profile: str | None, gpu: bool) -> ModelSizes:
    """The model's sizes, with its routing from the file `profile`.

    Raises ConfigError for another model's profile.
    """
    path = files.resolve(*worker.model.source)
    has_tied_embeddings = registry.has_tied_embeddings(
        path
    )  # first, since it checks the sizes that are read without a check
    device = "cuda" if gpu else "cpu"
    kernels = table.pick(device, worker.model.kernels)
    model = read_checkpoint_sizes(path, worker.model.model, kernels, worker.model.dtype, device)
    model = replace(model, activation_number=ROW_BYTES, ties_embeddings=has_tied_embeddings)
    model = replace(model, seat=model.seat + _count_draft_bytes(worker))
    if profile is not None:
        routing_profile = Profile.load(Path(profile))
        routing_profile.check(registry.routed_model(path).model, profile)
        model = replace(model, routing=Routing.from_profile(routing_profile, model.experts, model.top_k))
    return model


def _count_draft_bytes(worker: WorkerConfig) -> int:
    """Bytes that drafted tokens add to the states of a running sequence, over all layers."""
    text, path = worker.scheduler.speculative_config, files.resolve(*worker.model.source)
    if text is None:
        return 0
    spec = registry.read_spec(path)
    if spec.states is None:
        return 0
    num_tokens = SpeculativeConfig.parse(text).num_speculative_tokens
    return 4 * len(spec.state_layers) * num_tokens * spec.states.channels


def _cache_number(worker: WorkerConfig, model: ModelSizes, gpu: bool) -> float:
    dtype = worker.cache.kv_cache_dtype
    if dtype == "auto":
        return model.number if gpu else ROW_BYTES
    return model.cache_number(dtype)
