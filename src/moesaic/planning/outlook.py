"""Says before a model is loaded what it takes in each format, whether it fits, and how fast it would run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.config import ModelConfig, WorkerConfig
from moesaic.core.weight_types import BLOCK_TYPES, INTEGER_GROUP_TYPES, NATIVE_DTYPES
from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.plan import NEAR_SHARE, OVER_DISK
from moesaic.planning.search import MIB, Job, JobSearch
from moesaic.planning.sizes import in_format
from moesaic.policy.offloading.planner import SEARCHED, PolicySearch, SearchLimits
from moesaic.policy.offloading.policies import Workload
from moesaic.policy.offloading.pricing import Price, Pricing

PROMPT, GENERATE = 512, 128
"""Tokens of a prompt and of an answer for which speeds are predicted. Shorter contexts have fewer."""
REQUESTS = 1000
"""Number of requests of a job whose experts are streamed."""
SHORTEST = 512
"""Tokens of the shortest context with which a model counts as fitting."""


@dataclass(frozen=True)
class Format:
    """What a model takes with its routed experts in one type."""

    name: str
    """Type of the routed experts; see `core.weight_types.NATIVE_DTYPES`."""
    expert_bytes: float
    """Bytes of all routed experts."""
    other_bytes: float
    """Bytes of everything else: see `sizes.in_format`."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model."""
        return self.expert_bytes + self.other_bytes


def list_formats(model: ModelSizes, *extra_types: str) -> list[Format]:
    """List the model in every type that experts can have, but for blocks of GGUF files and narrow groups.

    extra_types: further types, such as float16.
    """
    types = dict.fromkeys(
        (
            *(name for name in NATIVE_DTYPES if name not in BLOCK_TYPES),
            *filter(None, (choose_groups(model, bits) for bits in (8, 4))),
            *extra_types,
        )
    )
    return [format_of(in_format(model, name, gpu=False), name) for name in types]


def choose_groups(model: ModelSizes, bits: int) -> str | None:
    """The type of integers of 4 or 8 bits in which other versions of a model are published: in groups of 128
    numbers, or the widest that its experts' rows are multiples of. None: no groups fit."""
    numbers = math.gcd(model.hidden, model.expert_width)
    types = (name for name in INTEGER_GROUP_TYPES if name.startswith(f"int{bits}_g"))
    return next((name for name in types if numbers % BLOCK_TYPES[name].numbers == 0), None)


def format_of(model: ModelSizes, name: str) -> Format:
    """What a model takes whose routed experts are in the type `name`."""
    return Format(name, model.moe_layers * model.routed_bytes, model.other_bytes)


@dataclass(frozen=True)
class Memory:
    """The memory that a model would be loaded into."""

    free: float
    """Bytes that are free now."""
    cache_share: float
    """Maximum share for the automatic KV cache of what is left after the weights."""
    cache_number: float
    """Bytes of a cached number."""


@dataclass(frozen=True)
class Fit:
    """Whether a model fits in memory in one format, beside a KV cache of the automatic size."""

    format: Format
    """The format of the checkpoint."""
    loaded_type: str
    """Type of the routed experts in memory, which is another one where the kernels cannot read the format."""
    left: float
    """Bytes that are left after the weights. It is negative if these do not fit."""
    cache: float
    """Bytes of the KV cache."""
    tokens: int
    """Tokens that it has room for."""
    longest: int
    """Maximum tokens of one request. It is the model's context, or less if the cache has no room for that."""

    @property
    def can_serve(self) -> bool:
        """Whether the model can be served."""
        return self.longest > 0


def fit(model: ModelSizes, checkpoint_format: Format, loaded_type: str, memory: Memory, context: int) -> Fit:
    """Fit one format into memory. model: as it is in memory. context: maximum tokens of a request."""
    left = memory.free - model.weights
    worker = WorkerConfig(ModelConfig(model.name))
    token = model.layers * model.cache(1, memory.cache_number)
    size, budget = worker.cache.block_size, memory.cache_share * left
    # Layers with states need a seat for each running request, and pages for snapshots of prefixes.
    if model.page:
        seats, snapshots = worker.state_room(budget - context * token, model.page, model.seat)
        budget -= seats * model.seat + (1 + seats + snapshots) * model.page
    blocks = worker.automatic_blocks(max(0.0, budget), size * token, context)
    tokens = blocks * size
    longest = min(context, tokens)
    return Fit(
        checkpoint_format,
        loaded_type,
        left,
        tokens * token,
        tokens,
        longest if longest >= min(SHORTEST, context) else 0,
    )


@dataclass(frozen=True)
class Speed:
    """The predicted speed of a model in memory."""

    requests: int
    """Number of requests at once."""
    prompts: float
    """Prompt tokens/s of all requests together."""
    answers: float
    """Generated tokens/s of all requests together, while they generate."""


def choose_lengths(context: int) -> tuple[int, int]:
    """Tokens of a prompt and of an answer for a prediction."""
    # Prefill gives the first token, so only a second one needs a decode step.
    generate = max(2, min(GENERATE, context // 2))
    return max(1, min(PROMPT, context - generate)), generate


def predict_speeds(
    model: ModelSizes, hardware: Hardware, cache_number: float, context: int, counts: Sequence[int]
) -> list[Speed]:
    """Predict the speed with everything on the fast level, by the cost model of `moesaic plan`.

    counts: numbers of requests at once. A number for which memory is too small is left out.
    """
    pricing = Pricing(model, hardware, Workload(*choose_lengths(context), cache_number))
    predictions = []
    for count in counts:
        limits = SearchLimits(("cgopipe",), largest_batch=count, fast_only=True)
        price = PolicySearch(pricing, replace(limits, micro_batch=count, micro_batches=1)).best()
        if price is not None:
            predictions.append(Speed(count, price.prefill_throughput, price.decode_throughput))
    return predictions


@dataclass(frozen=True)
class StreamedJob:
    """How a job runs whose experts do not all fit on the fast level."""

    fast_memory: str
    """Value of --fast-memory."""
    price: Price


def plan_streamed_job(
    model: ModelSizes, hardware: Hardware, cache_number: float, context: int
) -> StreamedJob | None:
    """Plan a job of REQUESTS requests with --fast-memory. None: it does not fit either."""
    gpu = hardware.slow.processor is not None
    prompt, generate = choose_lengths(context)
    limits = SearchLimits(
        SEARCHED if gpu else OVER_DISK,
        largest_batch=REQUESTS,
        requests=REQUESTS,
        tolerance=NEAR_SHARE,
    )
    room = int(hardware.fast.room) // MIB
    job = Job(REQUESTS, prompt, generate, prompt + generate)
    result = JobSearch(model, hardware, job, cache_number, limits).find_policy(room * MIB)
    return None if result is None else StreamedJob("auto" if gpu else f"{room}MiB", result[1])
