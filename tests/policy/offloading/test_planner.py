from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moesaic.core.errors import ConfigError
from moesaic.cost import ops
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.cost.machines import machine
from moesaic.cost.sizes import PUBLISHED_MODELS, GroupedQuery, ModelSizes
from moesaic.policy.offloading import footprint, planner
from moesaic.policy.offloading.advice import Batch, by_batch, find_worthwhile_batch, helps, without_offloading
from moesaic.policy.offloading.pipeline import SCHEDULES, Schedule
from moesaic.policy.offloading.planner import SearchLimits, candidates, fill_fast_level, search
from moesaic.policy.offloading.policies import PREFILL_ROW_SHARES, Policy, Workload, slow_share
from moesaic.policy.offloading.pricing import SLOW_MEMORY, Pricing, tasks_of
from moesaic.policy.offloading.splitting import experts_to_load
from moesaic.policy.offloading.tasks import Kind, Lane
from moesaic.policy.offloading.timeline import run

MIXTRAL, L4, JOB = PUBLISHED_MODELS["mixtral-8x7b"], machine("l4"), Workload(77, 128)
TINY = ModelSizes("tiny", 4, 64, 1000, GroupedQuery(4, 2, 16), 4, 8, 2, 128)
SMALL = Hardware(
    "small",
    Level("fast", 2.0e6, 1e9, Processor(1e10)),
    Level("slow", 1e9, 2e8, Processor(1e9)),
    Link(5e7, 5e7),
)


def test_worked_example_of_rounded_shares() -> None:
    job = Workload(72, 32)
    assert job.context == 104 and job.blocks == 7
    assert slow_share(job, 0.5) == 1 - 48 / 104
    assert slow_share(job, 1.0) == 0 and slow_share(job, 0.1) == 1


def test_the_rows_of_whole_prompts_take_memory() -> None:
    policy = Policy("cgopipe", 3, 2, slow_attention=True, fast_residual=True)
    found = Pricing(TINY, SMALL, Workload(100, 8)).footprint.fast(policy)
    assert found["rows"] == 6 * 100 * 64 * TINY.row_number


def test_a_step_is_priced_by_hand() -> None:
    """With one layer, one micro-batch and the serial schedule, a step takes the sum of its tasks."""
    model = ModelSizes("one", 1, 8, 16, GroupedQuery(2, 1, 4), 1, 4, 1, 16)
    fast = Level("fast", 1e9, 1e9, Processor(1e3))  # all products are limited by flops
    hardware = Hardware("x", fast, Level("slow", 1e9, 1e9, Processor(1e3)), Link(100.0, 50.0))
    pricing = Pricing(model, hardware, Workload(10, 4))
    policy = Policy("serial", 3, 1, slow_attention=True, static_experts=1)
    price = pricing.price(policy)
    rows, context = 3, 12
    flops = 2 * rows * (8 * 16 + 8 * 8 + 8 * 4 + 3 * 8 * 16 + 8 * 16)
    attention = rows * context * 4 * 2 * 4
    up, down = rows * 16 * 2, rows * 8 * 2 + 3 * 3 * 16 * 8 * 2
    assert price.step.seconds == pytest.approx((flops + attention) / 1e3 + up / 50 + down / 100)
    assert price.step.busy[Lane.LINK_DOWN.value] == pytest.approx(down / 100)
    assert price.decode_seconds == 3 * price.step.seconds
    assert price.throughput == 3 * 4 / (price.prefill.seconds + price.decode_seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slow_attention", [True, False])
def test_the_bound_is_the_busiest_lane_of_the_list_that_is_priced(
    schedule: Schedule, slow_attention: bool
) -> None:
    pricing = Pricing(TINY, SMALL, Workload(20, 10))
    policy = Policy(schedule, 4, 5, slow_attention and schedule != "s4", 2, slow_cache=1.0)
    price = pricing.price(policy)
    shape = pricing.shape(policy)
    table = pricing.durations.decode(policy)
    tasks = tasks_of(schedule, shape)
    line = run(tasks, [table[task.kind, task.lane] for task in tasks])
    for lane in Lane:
        assert price.step.busy[lane.value] == pytest.approx(line.busy[lane]), lane
    assert price.step.seconds == pytest.approx(max(line.makespan, price.step.busy[SLOW_MEMORY]), rel=1e-6)
    assert price.throughput <= pricing.bound(policy) * (1 + 1e-9)


def test_layers_beyond_the_first_cost_what_the_last_ones_did() -> None:
    deep = replace(TINY, layers=24, moe_layers=24)
    pricing = Pricing(deep, SMALL, Workload(20, 10))
    for schedule in SCHEDULES:
        policy = Policy(schedule, 4, 5, slow_attention=schedule != "s4")
        table = pricing.durations.decode(policy)
        tasks = tasks_of(schedule, pricing.shape(policy))
        whole = run(tasks, [table[task.kind, task.lane] for task in tasks]).makespan
        step = pricing.price(policy).step
        assert step.seconds == pytest.approx(max(whole, step.busy[SLOW_MEMORY]), rel=0.01), schedule


@pytest.mark.slow
def test_the_search_finds_the_best_of_all_that_fit() -> None:
    """Every candidate is priced. None is faster than the one that the search with pruning finds."""
    job, limits = Workload(20, 10), SearchLimits(largest_batch=24, split_cache=True)
    pricing = Pricing(TINY, SMALL, job)
    policies = list(candidates(pricing, limits))
    best = search(TINY, SMALL, job, limits)
    assert len(policies) > 50 and all(pricing.footprint.fits(policy) for policy in policies)
    assert best.throughput == max(pricing.price(policy).throughput for policy in policies)
    assert {policy.schedule for policy in policies} == set(planner.SEARCHED)
    assert {policy.slow_attention for policy in policies} == {True, False}
    assert len({policy.static_experts for policy in policies}) > 2
    assert any(0 < policy.slow_cache < 1 for policy in policies), "r_c is searched"


def test_policies_are_whole() -> None:
    pricing = Pricing(TINY, SMALL, Workload(20, 10))
    for policy in candidates(pricing, SearchLimits(largest_batch=24, split_cache=True)):
        kept = (1 - policy.slow_cache) * 30 / 16
        assert kept == pytest.approx(round(kept)) or policy.slow_cache == 0
        assert isinstance(policy.static_experts, int)
        assert policy.slow_cache == 1 or not policy.slow_attention


def test_the_cache_is_on_one_level_unless_it_may_be_split() -> None:
    """`run-batch` and `serve` carry out no other policy."""
    pricing = Pricing(TINY, SMALL, Workload(20, 10))
    found = list(candidates(pricing, SearchLimits(largest_batch=24)))
    assert {policy.slow_cache for policy in found} == {0, 1}
    assert all(pricing.footprint.fits(policy) for policy in found)


def test_the_fast_level_is_filled() -> None:
    """With attention on the slow processor, no further expert would fit on the fast level."""
    pricing = Pricing(MIXTRAL, L4, JOB)
    (policy,) = fill_fast_level(pricing, Policy("cgopipe", 128, 8, slow_attention=True))
    more = replace(policy, static_experts=policy.static_experts + 1)
    assert pricing.footprint.fits(policy) and not pricing.footprint.fits(more)


@pytest.mark.slow
def test_mixtral_on_the_l4_streams_layers_and_attends_on_the_cpu() -> None:
    """In the paper's main setting A_g = 0 and F_g = 1, and the link is the limit."""
    price = search(MIXTRAL, L4, JOB)
    policy = price.policy
    assert policy.schedule == "cgopipe" and policy.slow_attention and not policy.in_place
    assert price.step.bottleneck == "link down" and policy.batch > 1000
    assert sum(price.fast.values()) <= L4.fast.room and sum(price.slow.values()) <= L4.slow.room
    single = search(MIXTRAL, L4, JOB, SearchLimits(largest_batch=1))
    assert single.policy.schedule != "cgopipe", "section 3.3: below P1 nothing is swapped"


def test_a_disk_computes_nothing() -> None:
    """With RAM over a disk, attention and experts run on the fast level, whatever else is chosen."""
    disk = replace(SMALL, slow=replace(SMALL.slow, processor=None))
    price = search(TINY, disk, Workload(20, 10))
    assert not price.policy.slow_attention and not price.policy.in_place
    assert price.step.busy[Lane.SLOW.value] == 0


@pytest.mark.slow
def test_what_fits_is_compared_with_no_offloading_at_all() -> None:
    job = Workload(512, 128)
    planned, fast = search(MIXTRAL, machine("h200"), job), without_offloading(MIXTRAL, machine("h200"), job)
    assert fast is not None and fast.throughput <= planned.throughput
    assert sum(fast.slow.values()) == 0 and fast.step.busy[Lane.LINK_DOWN.value] == 0
    assert without_offloading(MIXTRAL, L4, job) is None


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"deepseek-v3 does not fit on l4: .* GiB of GPU memory \(two layers"
    ):
        search(PUBLISHED_MODELS["deepseek-v3"], L4, JOB)
    with pytest.raises(ConfigError, match=r"GiB of RAM, 24 cores \(experts"):
        search(MIXTRAL, L4.with_slow(memory=60 * GIB), JOB)


@pytest.mark.slow
def test_prefill_is_in_the_objective() -> None:
    """A slow prefill does not favour long batches of long prompts, and the throughput includes it."""
    assert L4.fast.processor is not None
    slow = replace(L4, fast=replace(L4.fast, processor=replace(L4.fast.processor, prefill=0.01)))
    fast, tired = (search(MIXTRAL, one, Workload(418, 32)) for one in (L4, slow))
    assert tired.throughput < fast.throughput / 2
    assert tired.prefill.bottleneck == Lane.FAST.value


def test_schedules_compare_as_in_table_5() -> None:
    """CGOPipe is faster than S4 under the same policy. S4 is faster with our policy than with FlexGen's."""
    pricing = Pricing(MIXTRAL, machine("t4-measured"), Workload(418, 128))

    def throughput(schedule: Schedule, mu: int, count: int) -> float:
        policy = Policy(schedule, mu, count, slow_attention=schedule == "cgopipe")
        return pricing.price(policy).throughput

    assert throughput("cgopipe", 36, 14) > 1.2 * throughput("s4", 36, 14)
    assert throughput("s4", 36, 14) > throughput("s4", 8, 139)


@pytest.mark.slow
def test_flexgens_policy_is_priced_as_its_own_schedule() -> None:
    price, predicted = planner.by_flexgen(MIXTRAL, L4, JOB)
    assert price.policy.schedule == "s4" and not price.policy.slow_attention and predicted > 0
    assert price.throughput < search(MIXTRAL, L4, JOB).throughput


@pytest.mark.slow
def test_machines_with_the_same_memories_share_what_fits() -> None:
    """Machines with the same memories allow the same policies."""
    quick = replace(SMALL, slow=replace(SMALL.slow, bandwidth=9e8, processor=None), link=Link(9e7, 8e7))
    others = (
        replace(SMALL, fast=replace(SMALL.fast, memory=3e6)),
        replace(SMALL, slow=replace(SMALL.slow, usable=0.5)),
        replace(SMALL, link=replace(SMALL.link, staging=1e9)),
    )
    first, second, *rest = (Pricing(TINY, one, Workload(20, 10)) for one in (SMALL, quick, *others))
    assert planner._footprint(first) is planner._footprint(second)
    assert len({planner._footprint(one) for one in (first, *rest)}) == 4
    for pricing in (first, second, *rest):
        shared, found = planner._footprint(pricing), list(candidates(pricing, SearchLimits()))
        assert found and all(pricing.footprint.fits(one) for one in found)
        for one in found:
            assert (shared.fast(one), shared.slow(one)) == (
                pricing.footprint.fast(one),
                pricing.footprint.slow(one),
            )


@pytest.mark.slow
def test_helps_name_the_bottleneck() -> None:
    found = helps(TINY, SMALL, Workload(20, 10), search(TINY, SMALL, Workload(20, 10)))
    assert len(found) == 7 and [one.gain for one in found] == sorted(
        (one.gain for one in found), reverse=True
    )
    assert all(one.gain > 0.999 for one in found), "twice of anything never hurts"


def test_batches_and_their_crossing() -> None:
    found = by_batch(TINY, SMALL, Workload(20, 10), max_batch=8)
    assert [one.requests for one in found] == [1, 2, 4, 8]
    rates = [one.streamed for one in found if one.streamed is not None]
    assert rates == sorted(rates), "a larger limit never hurts"
    crossing = [Batch(1, 1.0, 3.0), Batch(2, 4.0, 3.0), Batch(4, 9.0, None)]
    assert find_worthwhile_batch(crossing) == 2
    assert find_worthwhile_batch([Batch(1, 4.0, 3.0), Batch(2, 1.0, 3.0)]) is None
    assert find_worthwhile_batch([Batch(1, None, 3.0)]) is None


def test_wrong_workloads_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompt: got 0"):
        Workload(0, 1)
    assert math.isclose(Workload(1, 1).context, 2)


@pytest.mark.parametrize(
    ("memory", "smaller"),
    [(1.5e6, True), *(pytest.param(memory, False, marks=pytest.mark.slow) for memory in (2e6, 1e9))],
)
def test_prompts_take_less_memory_where_requests_and_experts_need_it(
    memory: float, smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = replace(SMALL, fast=replace(SMALL.fast, memory=memory))
    found = search(TINY, hardware, Workload(20, 10))
    monkeypatch.setattr(footprint, "PREFILL_ROW_SHARES", PREFILL_ROW_SHARES[:1])
    wide = search(TINY, hardware, Workload(20, 10))
    assert wide.policy.prefill_share == PREFILL_ROW_SHARES[0]
    assert (found.policy.prefill_share < PREFILL_ROW_SHARES[0]) == smaller
    assert (found.throughput > wide.throughput) == smaller


QWEN3 = PUBLISHED_MODELS["qwen3-30b-a3b"]
FEW = SearchLimits(largest_batch=4)


@pytest.mark.parametrize(("name", "chosen"), [("l4", True), ("a100-40", True), ("h100", False)])
def test_few_requests_split_the_experts_where_some_are_in_ram(name: str, chosen: bool) -> None:
    """On the H100 all of them fit. The price is that of the split by which a worker then runs."""
    found = search(QWEN3, machine(name), Workload(77, 128), FEW)
    assert (found.policy.schedule == "split") == chosen
    without = tuple(one for one in planner.SEARCHED if one != "split")
    others = search(QWEN3, machine(name), Workload(77, 128), replace(FEW, schedules=without))
    assert found.throughput > others.throughput if chosen else found == others


@pytest.mark.parametrize("slower", ["link", "CPU", "no CPU"])
def test_no_experts_are_split_where_that_cannot_win(slower: str) -> None:
    hardware = {
        "link": replace(L4, link=replace(L4.link, down_bandwidth=L4.link.down_bandwidth / 1000)),
        "CPU": replace(L4, slow=replace(L4.slow, processor=Processor(1e7))),
        "no CPU": replace(L4, slow=replace(L4.slow, processor=None)),
    }[slower]
    assert search(QWEN3, hardware, Workload(77, 128), FEW).policy.schedule != "split"


def test_a_split_step_is_priced_as_the_experts_that_a_worker_would_load() -> None:
    pricing = Pricing(QWEN3, L4, Workload(77, 128))
    policy = Policy("split", 4, 1, slow_attention=False, static_experts=38, slow_cache=0.0)
    table, prices = pricing.durations.decode(policy), pricing.durations.split_prices()
    missing = round(ops.distinct(QWEN3, 4) * (1 - 38 / 128))
    held = round(ops.distinct(QWEN3, 4)) - missing
    rows = round(ops.rows_each(QWEN3, 4))
    count = len(experts_to_load(prices, dict.fromkeys(range(missing), rows), [rows] * held))
    assert 0 < count < missing
    per_expert = QWEN3.expert_bytes / L4.link.down_bandwidth
    assert table[Kind.LOAD_CHOSEN, Lane.LINK_DOWN] == pytest.approx(count * per_expert, rel=0.1)
    there = prices.slow.seconds(rows) * (missing - count)
    assert table[Kind.EXPERTS, Lane.SLOW] == pytest.approx(there, rel=0.2)
