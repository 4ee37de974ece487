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
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.ranks import model_of_rank, share_of_rank
from moesaic.cost.routing import Routing
from moesaic.cost.sizes import ModelSizes
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.shard import Shard
from moesaic.planning.search import Job, JobSearch
from moesaic.planning.sizes import ROW_BYTES, of_checkpoint
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.planner import SEARCHED, SearchLimits
from moesaic.policy.offloading.pricing import Price, Pricing

SAMPLING = 14
"""Maximum number of copies of a row's logits in memory while its token is sampled."""
NEAR = 0.01
"""Policies count as equal if their speeds differ by less than this share. Many do when the disk is the
limit."""
OVER_DISK: tuple[Schedule, ...] = ("cgopipe", "on-demand")
"""Schedules that work with a disk as the slow level, in the order of the search."""
COMPUTED_BESIDE: tuple[Schedule, ...] = ("in-place", "split", "s2", "s3")
"""Schedules in which the CPU computes."""
GATED_FIRST: tuple[Schedule, ...] = ("on-demand", "in-place", "split")
"""Schedules that compute a layer's gates before they load any of its experts."""
EXCHANGING: tuple[Schedule, ...] = ("on-demand", "split")
"""Schedules in which experts on a GPU that are chosen often take the places of others."""
OF_A_GROUP: tuple[Schedule, ...] = ("cgopipe",)
"""Schedules for a group of processes.

The ranks exchange rows between gate and experts, so gate and experts have to be one task.
"""


@dataclass(frozen=True)
class Planned:
    """A policy and its inputs. For a group of processes they are those of each rank."""

    model: ModelSizes
    hardware: Hardware
    """The machine, with the fast level reduced to the memory that the worker may take."""
    price: Price
    worker: WorkerConfig
    """Settings of the worker that runs the policy."""

    def predicted(self, done: PassStats, link: float | None = None) -> float:
        """Seconds that these passes should have taken, by the roofline of their rows.

        Logits are not included.

        link: bytes/s that the slow level reached, if known. None: the plan's figure.
        """
        hardware = self.hardware if link is None else self.hardware.with_link(link)
        sequences = done.passes * done.sequences
        policy = replace(
            self.price.policy,
            micro_batch=math.ceil(done.sequences / done.micro_batches),
            micro_batches=done.micro_batches,
        )
        rows, context = done.rows + done.padding_rows, done.context + done.padding_context
        tokens = rows if done.prefill else context
        workload = replace(self.price.workload, prompt=max(1, round(tokens / sequences)), generate=1)
        pricing = Pricing(replace(self.model, vocab=0), hardware, workload)
        phase = pricing.prefill(policy, done.micro_batches) if done.prefill else pricing.step(policy)
        return done.passes * phase.seconds + done.cold * pricing.durations.first_layer(policy)


def plan(
    worker: WorkerConfig, options: OffloadConfig, job: Job, hardware: Hardware, gpus: int = 0
) -> Planned:
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
    found = search.within(cap)
    if found is None:
        least = search.least(cap)
        if least is None:
            raise ConfigError(search.why_not(cap))
        allowed = f"at least {least}MiB for {search.model.name} and these requests"
        raise ConfigError.field("--fast-memory", options.fast_memory, allowed)
    pricing, price, tokens = found
    settings = _padded(_settings(worker, pricing, price, tokens), job.padded)
    return Planned(search.model, pricing.hardware, price, settings)


def _experts_of_rank(worker: WorkerConfig, model: ModelSizes) -> int:
    """The largest number of experts of one layer that a rank has.

    Raises ConfigError if the heads cannot be divided, and for a placement of another model's experts.
    """
    parallel, path = worker.parallel, files.resolve(worker.model.model, worker.model.revision)
    registry.read_spec(path, Shard(0, parallel.tensor_parallel_size))
    if parallel.placement is None:
        return math.ceil(model.experts / parallel.tensor_parallel_size)
    routed = registry.routed_model(path)
    placement = Placement.read(parallel.placement, parallel.tensor_parallel_size)
    placement.check(routed.model, routed.layers, routed.num_experts)
    return max(len(experts) for servers in placement.held.values() for experts in servers.values())


def _refuse_machine(hardware: Hardware, options: OffloadConfig, gpu: bool) -> None:
    """Raises ConfigError if a disk should compute, or should be a GPU's slow memory."""
    if gpu == (hardware.slow.processor is not None):
        return
    levels = "GPU memory over RAM" if gpu else "RAM over a disk, which computes nothing"
    known = "a known GPU, or " if gpu else ""
    allowed = f"{known}a file of `moesaic hardware measure --device {'cuda' if gpu else 'cpu'}`: {levels}"
    raise ConfigError.field("--hardware", options.hardware, allowed)


def _cap(options: OffloadConfig, hardware: Hardware, gpu: bool) -> int:
    """The fast memory in bytes. Raises ConfigError if it is not a size, or more than the GPU has."""
    assert options.fast_memory is not None
    if options.fast_memory == "auto":
        if not gpu:
            raise ConfigError.field("--fast-memory", "auto", "a size, such as 2GiB; auto is for a GPU")
        return int(hardware.fast.room)
    cap = parse_bytes("--fast-memory", options.fast_memory)
    if gpu and cap > hardware.fast.memory:
        most = f"at most {hardware.fast.memory / GIB:.1f} GiB, the memory of {hardware.name}"
        raise ConfigError.field("--fast-memory", options.fast_memory, most)
    return cap


def _refuse_planned(worker: WorkerConfig, options: OffloadConfig, gpu: bool) -> None:
    """Raises ConfigError for flags that the plan sets, and for schedules that this machine or group lacks."""
    if options.offload_schedule in COMPUTED_BESIDE and not gpu:
        allowed = "auto, cgopipe, on-demand, s4, serial over a disk, which computes nothing"
        raise ConfigError.field("--offload-schedule", options.offload_schedule, allowed)
    if gpu and worker.cache.kv_cache_dtype == "float16":
        allowed = "auto, bfloat16, float32, int8 with --fast-memory on a GPU: the CPU reads it, too"
        raise ConfigError.field("--kv-cache-dtype", "float16", allowed)
    if worker.parallel.tensor_parallel_size > 1 and options.offload_schedule in GATED_FIRST:
        allowed = f"auto, cgopipe, {'s2, s3, ' * gpu}s4, serial with --tensor-parallel-size"
        raise ConfigError.field("--offload-schedule", options.offload_schedule, allowed)
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
            allowed = "nothing with --fast-memory, whose plan sets it (see --micro-batch-size)"
            raise ConfigError.field(flag, value, allowed)


def longest_request(worker: WorkerConfig) -> int:
    """Maximum number of tokens of one request, prompt and answer, by the settings and by the model.

    Raises ConfigError for a --max-model-len above the model's own.
    """
    own = registry.read_spec(files.resolve(worker.model.model, worker.model.revision)).max_position
    given = worker.model.max_model_len or own
    if given > own:
        raise ConfigError.field("--max-model-len", given, f"at most {own}, the model's own")
    return given


def _limits(options: OffloadConfig, job: Job, ranks: int, gpu: bool) -> SearchLimits:
    size = options.micro_batch_size
    searched = OF_A_GROUP if ranks > 1 else SEARCHED if gpu else OVER_DISK
    return SearchLimits(
        schedules=searched if options.offload_schedule == "auto" else (options.offload_schedule,),
        largest_batch=job.requests,
        micro_batch=None if size is None else int(min(size, job.requests)),
        micro_batches=options.micro_batches,
        requests=job.requests,
        whole_cache=True,
        near=NEAR,
    )


def _settings(worker: WorkerConfig, pricing: Pricing, price: Price, tokens: int) -> WorkerConfig:
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
        hot=pricing.hardware.slow.processor is not None and policy.schedule in EXCHANGING,
        prices=pricing.durations.split_prices() if policy.schedule == "split" else None,
    )
    scheduler = replace(
        worker.scheduler,
        max_num_seqs=policy.batch,
        max_num_batched_tokens=policy.batch * workload.prompt,
    )
    states = policy.batch * (pricing.model.seat + pricing.model.page) + pricing.model.page
    size = math.ceil(tokens / block) * block * round(token) + math.ceil(states)
    size *= worker.parallel.tensor_parallel_size
    cache = replace(worker.cache, kv_cache_memory=str(size))
    model = replace(worker.model, max_model_len=min(longest_request(worker), tokens))
    return replace(worker, model=model, cache=cache, scheduler=scheduler, offload=offload)


def _padded(worker: WorkerConfig, longest: int | None) -> WorkerConfig:
    """The settings with padding to `longest`, if that is given.

    With padding, prompts are computed completely, without a shared prefix.
    """
    if longest is None:
        return worker
    assert worker.offload is not None
    cache = replace(worker.cache, enable_prefix_caching=False)
    return replace(worker, offload=replace(worker.offload, padded=longest), cache=cache)


def _sizes(worker: WorkerConfig, profile: str | None, gpu: bool) -> ModelSizes:
    """The model's sizes, with its routing from the file `profile`.

    Raises ConfigError for another model's profile.
    """
    path = files.resolve(worker.model.model, worker.model.revision)
    tied = registry.has_tied_embeddings(
        path
    )  # first, since it checks the sizes that are read without a check
    device = "cuda" if gpu else "cpu"
    kernels = table.pick(device, worker.model.kernels)
    model = of_checkpoint(path, worker.model.model, kernels, worker.model.dtype, device)
    model = replace(model, computed=ROW_BYTES, tied=tied)
    if profile is not None:
        known = Profile.load(Path(profile))
        known.check(registry.routed_model(path).model, profile)
        model = replace(model, routing=Routing.of(known, model.experts, model.top_k))
    return model


def _cache_number(worker: WorkerConfig, model: ModelSizes, gpu: bool) -> float:
    dtype = worker.cache.kv_cache_dtype
    if dtype == "auto":
        return model.number if gpu else ROW_BYTES
    return model.cache_number(dtype)
