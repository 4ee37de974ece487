"""Plans a server with a model larger than its fast memory, and prices its steps at several loads.

The memory is divided for as many requests as may run at the same time. While the load changes it is divided
anew (`policy.offloading.dividing`), and how decode steps are computed is chosen again
(`policy.offloading.revising`), by the prices that are computed here.

Question: How are the ways to compute a step priced for `serve --fast-memory`?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moesaic.config import OffloadConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Choice, DivisionPrices, Load
from moesaic.cost.hardware import Hardware
from moesaic.planning.outlook import GENERATE, PROMPT
from moesaic.planning.plan import WorkerPlan, longest_request, plan
from moesaic.planning.search import Job
from moesaic.policy.offloading.pipeline import SCHEDULES, Schedule
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Pricing

LONGEST = 2048
"""Tokens of the longest request for which there is room, unless --max-model-len is given. There may be room
for a longer one."""
LOAD_SCHEDULES: tuple[Schedule, ...] = ("cgopipe", "on-demand")
"""Schedules among which the load decides."""
CONTEXTS = (256, 1024, 4096)
"""Mean contexts in tokens at which steps are priced, up to the longest request."""


def estimate_job(worker: WorkerConfig) -> Job:
    """The requests for which a server is planned: --max-num-seqs of a typical length at the same time."""
    longest = longest_request(worker)
    if worker.model.max_model_len is None:
        longest = min(longest, LONGEST)
    generate = max(2, min(GENERATE, longest // 2))
    prompt = max(1, min(PROMPT, longest - generate))
    return Job(worker.scheduler.max_num_seqs, prompt, generate, longest)


def plan_server(
    worker: WorkerConfig, options: OffloadConfig, hardware: Hardware, gpus: int = 0
) -> WorkerPlan:
    """Plan a server. Over a disk, experts that are chosen often stay, and the plan is revised by the load.

    Raises the errors of `plan`, and ConfigError for --pad.
    """
    if options.pad:
        raise ConfigError.field("--pad", "true", "false in serve, which does not know the longest prompt")
    job = estimate_job(worker)
    # `plan` refuses --max-num-seqs, which is a setting of the load here and not of the plan.
    seats = replace(worker.scheduler, max_num_seqs=SchedulerConfig.max_num_seqs)
    worker_plan = plan(replace(worker, scheduler=seats), options, job, hardware, gpus)
    offload = worker_plan.worker.offload
    assert offload is not None
    if gpus or worker.parallel.tensor_parallel_size > 1:
        return worker_plan
    loads = _loads(worker_plan)
    offload = replace(
        offload,
        hot=True,
        loads=loads,
        choices=_choices(worker_plan, options, loads),
        division=_price_division(worker_plan, loads) if options.memory_division == "follow" else None,
    )
    return replace(worker_plan, worker=replace(worker_plan.worker, offload=offload))


def _loads(worker_plan: WorkerPlan) -> tuple[Load, ...]:
    max_requests, longest = worker_plan.price.policy.batch, worker_plan.worker.model.max_model_len
    assert longest is not None
    counts = [2**power for power in range(max_requests.bit_length()) if 2**power < max_requests] + [
        max_requests
    ]
    contexts = [length for length in CONTEXTS if length < longest] or [longest]
    return tuple(Load(count, context) for count in counts for context in contexts)


def _choices(worker_plan: WorkerPlan, options: OffloadConfig, loads: tuple[Load, ...]) -> tuple[Choice, ...]:
    """The policies of which each is the fastest at one of the loads, with prices at all of them."""
    best: dict[tuple[str, int, int], Policy] = {}
    for load in loads:
        pricing = _pricing(worker_plan, load)
        policies = list(_candidates(worker_plan, options, pricing, load))
        fastest = min(policies, key=lambda policy: pricing.step(policy).seconds)
        best[fastest.schedule, fastest.micro_batch, fastest.likely_experts] = fastest
    return tuple(
        Choice(
            *key,
            tuple(_pricing(worker_plan, load).step(_fit_to_load(policy, load)).seconds for load in loads),
        )
        for key, policy in best.items()
    )


def _price_division(worker_plan: WorkerPlan, loads: tuple[Load, ...]) -> DivisionPrices:
    """Predicts what dividing memory goes by: steps that read no expert, at the shortest contexts."""
    model, price = worker_plan.model, worker_plan.price
    shortest = min(load.context for load in loads)
    loads = tuple(load for load in loads if load.context == shortest)
    policy = replace(
        price.policy, schedule="on-demand", static_experts=model.experts, micro_batch=1, likely_experts=0
    )
    return DivisionPrices(
        tuple(load.requests for load in loads),
        tuple(
            _pricing(worker_plan, load)
            .step(replace(policy, micro_batch=load.requests, micro_batches=1))
            .seconds
            for load in loads
        ),
        _pricing(worker_plan, loads[0]).durations.read_seconds,
        layers=model.moe_layers,
        num_experts=model.experts,
        top_k=model.top_k,
    )


def _candidates(
    worker_plan: WorkerPlan, options: OffloadConfig, pricing: Pricing, load: Load
) -> Iterator[Policy]:
    """Policies that fit into the memory as it is divided."""
    base, schedule_name = worker_plan.price.policy, options.offload_schedule
    schedules = (
        LOAD_SCHEDULES
        if schedule_name == "auto"
        else tuple(name for name in SCHEDULES if name == schedule_name)
    )
    sizes = [2**power for power in range(base.batch.bit_length())]
    if options.micro_batch_size is not None:
        sizes = [base.micro_batch]
    elif options.micro_batches is not None:
        sizes = [-(-load.requests // options.micro_batches)]
    max_rows = max(
        base.micro_batch, pricing.footprint.prefill_requests(base) * worker_plan.price.workload.prompt
    )
    for schedule in schedules:
        for size in sizes:
            # The memory is divided for passes of so many rows, so a larger micro-batch does not fit.
            if size <= max_rows:
                policy = _fit_to_load(
                    replace(base, schedule=schedule, micro_batch=size, likely_experts=0), load
                )
                likely_experts = pricing.durations.likely_experts(policy) if schedule == "on-demand" else 0
                yield replace(policy, likely_experts=likely_experts)


def _fit_to_load(policy: Policy, load: Load) -> Policy:
    """The policy with as many micro-batches as the load has."""
    return replace(policy, micro_batches=-(-load.requests // policy.micro_batch))


def _pricing(worker_plan: WorkerPlan, load: Load) -> Pricing:
    workload = Workload(load.context, 1, worker_plan.price.workload.cache_number)
    return Pricing(replace(worker_plan.model, vocab=0), worker_plan.hardware, workload)
