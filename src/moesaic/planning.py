"""From a job and a machine to the settings of a worker whose model is larger than its fast memory.

And back: what the passes that it made should have taken, beside what they took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.config import CacheConfig, OffloadConfig, SchedulerConfig, WorkerConfig, parse_bytes
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import PassStats
from moesaic.core.offload import Offload
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.cost.hardware import Hardware
from moesaic.cost.ranks import model_of_rank, share_of_rank
from moesaic.cost.reading import read
from moesaic.cost.routing import Routing
from moesaic.cost.sizes import BYTES, ModelSizes
from moesaic.models import files, registry
from moesaic.models.shard import Shard
from moesaic.policy import planner
from moesaic.policy.pipeline import Schedule
from moesaic.policy.planner import Limits
from moesaic.policy.policies import BLOCK, Workload
from moesaic.policy.pricing import Price, Pricing

MIB = 1 << 20
ROW_BYTES = 4.0
"""A CPU computes in float32, and caches in it unless told otherwise."""
USABLE = 0.95
"""Of --fast-memory. The rest is what malloc loses between its pieces."""
SAMPLING = 14
"""Copies of a row's logits that are in memory while a token is drawn from it, at most."""
NEAR = 0.01
"""Where the disk is the limit many policies are as fast as each other."""
OVER_DISK: tuple[Schedule, ...] = ("cgopipe", "on-demand")
"""Schedules that a disk can feed, as they are searched."""
OF_A_GROUP: tuple[Schedule, ...] = ("cgopipe",)
"""The same of a group of processes, which meets between gate and experts: these are one task then."""


@dataclass(frozen=True)
class Job:
    """Requests, in tokens."""

    requests: float
    """How many there are; math.inf: more come."""
    prompt: int
    """Of a request, in the mean."""
    generate: int
    longest: int
    """The most that one request has in the end."""
    padded: int | None = None
    """What each prompt is padded to; None: nothing is."""

    @property
    def computed(self) -> int:
        """Of a prompt with its padding."""
        return self.prompt if self.padded is None else self.padded


@dataclass(frozen=True)
class Planned:
    """A policy and what it was chosen for. Of a group of processes: of each of its ranks."""

    model: ModelSizes
    hardware: Hardware
    """With the fast level cut to what it may take."""
    price: Price
    worker: WorkerConfig
    """That carries it out."""

    def predicted(self, done: PassStats, link: float | None = None) -> float:
        """Seconds that these passes should have taken, by the roofline of what was in them: no logits are.

        link: bytes/s that the slow level sent, where it is known; None: as the plan had it.
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


def plan(worker: WorkerConfig, options: OffloadConfig, job: Job, hardware: Hardware) -> Planned:
    """The policy for RAM over the disk of the checkpoint, and a worker's settings for it.

    Raises ConfigError for a cap that is too small, with the smallest that is not, for flags that the plan
    sets or that leave nothing to choose from, and for a machine whose slow level computes: it is no disk.
    """
    assert options.fast_memory is not None
    _refuse_planned(worker, options)
    if hardware.slow.processor is not None:
        allowed = "a file of `moesaic hardware measure --device cpu`: RAM over a disk, which computes nothing"
        raise ConfigError.field("--hardware", options.hardware, allowed)
    cap = parse_bytes("--fast-memory", options.fast_memory)
    model, limits = _sizes(worker, options.profile), _limits(options, job, worker.group.size)
    if worker.group.size > 1:
        model = model_of_rank(model, worker.group.size, _experts_of_rank(worker, model))
        hardware = share_of_rank(hardware, worker.group.size)
    search = _Search(model, hardware, job, _cache_number(worker, model), limits)
    found = search.within(cap)
    if found is None:
        raise ConfigError.field(
            "--fast-memory",
            options.fast_memory,
            f"{search.allowed()} for {search.model.name} and these requests",
        )
    pricing, price, tokens = found
    settings = _padded(_settings(worker, pricing, price, tokens), job.padded)
    return Planned(search.model, pricing.hardware, price, settings)


def _experts_of_rank(worker: WorkerConfig, model: ModelSizes) -> int:
    """The most experts of a layer that a rank has.

    Raises ConfigError for heads that cannot be dealt out, and for a placement of another model's experts.
    """
    group, path = worker.group, files.resolve(worker.model.model, worker.model.revision)
    routed = registry.read_spec(path, Shard(0, group.size)).routed
    if group.placement is None:
        return math.ceil(model.experts / group.size)
    placement = Placement.read(group.placement, group.size)
    placement.check(routed.model, routed.layers, routed.num_experts)
    return max(len(experts) for servers in placement.held.values() for experts in servers.values())


def _refuse_planned(worker: WorkerConfig, options: OffloadConfig) -> None:
    """Flags that are the plan's to set, and a schedule that a group of processes does not have."""
    if worker.group.size > 1 and options.offload_schedule == "on-demand":
        allowed = "auto, cgopipe, s4, serial with --tensor-parallel-size"
        raise ConfigError.field("--offload-schedule", "on-demand", allowed)
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
    """Tokens that one request may have, prompt and answer, by the settings and by the model.

    Raises ConfigError for a --max-model-len that the model does not have.
    """
    own = registry.read_spec(files.resolve(worker.model.model, worker.model.revision)).max_position
    given = worker.model.max_model_len or own
    if given > own:
        raise ConfigError.field("--max-model-len", given, f"at most {own}, the model's own")
    return given


def _limits(options: OffloadConfig, job: Job, ranks: int) -> Limits:
    size = options.micro_batch_size
    searched = OVER_DISK if ranks == 1 else OF_A_GROUP
    return Limits(
        schedules=searched if options.offload_schedule == "auto" else (options.offload_schedule,),
        largest_batch=job.requests,
        micro_batch=None if size is None else int(min(size, job.requests)),
        micro_batches=options.micro_batches,
        requests=job.requests,
        near=NEAR,
    )


class _Search:
    """For one job, under one cap or another."""

    def __init__(
        self, model: ModelSizes, hardware: Hardware, job: Job, cache_number: float, limits: Limits
    ) -> None:
        self.model = model
        self._hardware = hardware
        self._workload = Workload(job.computed, max(job.generate, 2), cache_number, unfilled=BLOCK // 2)
        self._longest = math.ceil(job.longest / BLOCK) * BLOCK
        self._limits = limits
        self._token = model.layers * model.cache(1, cache_number)

    def within(self, cap: int) -> tuple[Pricing, Price, int] | None:
        """The best policy, and the tokens that its cache holds: at least the longest request's.

        Where that one is longer than a whole batch of mean ones, room is set aside for it.
        """
        for aside in (0.0, self._longest * self._token):
            pricing = self._pricing(cap, aside)
            price = planner.Search(pricing, self._limits).best()
            if price is None:
                return None
            room = self._pricing(cap).hardware.fast.room - sum(price.fast.values()) + price.fast["cache"]
            tokens = min(int(room / self._token), price.policy.batch * self._longest) // BLOCK * BLOCK
            if tokens >= self._longest:
                return self._pricing(cap), price, tokens
        return None

    def allowed(self) -> str:
        """What caps there are to choose from. Example: at least 275MiB."""
        low, high = 0, 1
        while not self._fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return f"at least {high}MiB"

    def _fits(self, mebibytes: int) -> bool:
        """Whether some policy fits even with the longest request's cache set aside."""
        pricing = self._pricing(mebibytes * MIB, self._longest * self._token)
        return any(True for _ in planner.candidates(pricing, self._limits))

    def _pricing(self, cap: float, aside: float = 0.0) -> Pricing:
        """aside: bytes of the cap that no policy gets."""
        memory = max(cap - aside / USABLE, 0.0)
        fast = replace(self._hardware.fast, name="--fast-memory", memory=memory, usable=USABLE)
        return Pricing(self.model, replace(self._hardware, fast=fast), self._workload)


def _settings(worker: WorkerConfig, pricing: Pricing, price: Price, tokens: int) -> WorkerConfig:
    """tokens: of the cache."""
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
        logit_rows=max(1, int(price.fast["workspace"] / logits)),
    )
    scheduler = replace(
        worker.scheduler,
        max_num_seqs=policy.batch,
        max_num_batched_tokens=policy.batch * workload.prompt,
    )
    held = worker.group.size * math.ceil(tokens / block) * block * round(token)
    cache = replace(worker.cache, kv_cache_memory=str(held))
    model = replace(worker.model, max_model_len=min(longest_request(worker), tokens))
    return replace(worker, model=model, cache=cache, scheduler=scheduler, offload=offload)


def _padded(worker: WorkerConfig, longest: int | None) -> WorkerConfig:
    """Prompts are computed whole then, none from another's prefix."""
    if longest is None:
        return worker
    assert worker.offload is not None
    cache = replace(worker.cache, enable_prefix_caching=False)
    return replace(worker, offload=replace(worker.offload, padded=longest), cache=cache)


def _sizes(worker: WorkerConfig, profile: str | None) -> ModelSizes:
    """profile: file of its routing. Raises ConfigError for one of another model."""
    path = files.resolve(worker.model.model, worker.model.revision)
    raw: dict[str, Any] = files.read_json(path / "config.json")
    model = replace(read(raw, worker.model.model), computed=ROW_BYTES, tied=registry.is_tied(path))
    if profile is not None:
        known = Profile.load(Path(profile))
        known.check(registry.read_spec(path).routed.model, profile)
        model = replace(model, routing=Routing.of(known, model.experts, model.top_k))
    dtype = worker.model.dtype
    return model if dtype == "auto" else model.with_number(BYTES[dtype])


def _cache_number(worker: WorkerConfig, model: ModelSizes) -> float:
    dtype = worker.cache.kv_cache_dtype
    return ROW_BYTES if dtype == "auto" else model.cache_number(dtype)
